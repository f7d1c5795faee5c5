// What can be done to sandboxes without holding them, and what cannot be done, by E2B's JavaScript client.

import assert from 'node:assert/strict'
import { get } from 'node:http'
import { text } from 'node:stream/consumers'
import { before, test } from 'node:test'
import {
  ALL_TRAFFIC,
  AuthenticationError,
  E2B,
  FileNotFoundError,
  InvalidArgumentError,
  Sandbox,
  SandboxError,
  SandboxNotFoundError,
} from 'e2b'

import { eventually } from './eventually.mjs'
import { kept } from './kept.mjs'

const MISSING = '0123456789abcdef'

let sandbox

before(async () => {
  sandbox = kept(await Sandbox.create({ timeoutMs: 600_000, metadata: { lives: 'shared' } }))
})

async function ids(paginator) {
  const found = []
  while (paginator.hasNext) found.push(...(await paginator.nextItems()))
  return found.map((one) => one.sandboxId ?? one.snapshotId)
}

const isRefused = (reason) => (error) => error instanceof SandboxError && reason.test(error.message)

test('a sandbox is described, measured and extended by its id', async () => {
  const { sandboxId } = sandbox
  const info = await Sandbox.getInfo(sandboxId)
  assert.deepEqual([info.sandboxId, info.templateId, info.state], [sandboxId, 'base', 'running'])
  assert.deepEqual([info.cpuCount, info.memoryMB, info.allowInternetAccess], [1, 512, true])
  assert.deepEqual(info.lifecycle, { onTimeout: 'kill', autoResume: false })
  assert.deepEqual(await Sandbox.getFullInfo(sandboxId), info)
  await Sandbox.setTimeout(sandboxId, 900_000)
  const left = (await Sandbox.getInfo(sandboxId)).endAt - Date.now()
  assert.ok(left > 880_000 && left < 905_000, `${left}`)
  const [sample] = await eventually(async () => {
    const samples = await Sandbox.getMetrics(sandboxId)
    return samples.length > 0 && samples
  })
  assert.ok(sample.memUsed > 0 && sample.memUsed < sample.memTotal)
  assert.ok(sample.diskUsed > 0 && sample.diskUsed < sample.diskTotal)
  const past = { start: new Date('2000-01-01'), end: new Date('2001-01-01') }
  assert.deepEqual(await Sandbox.getMetrics(sandboxId, past), [])
  assert.deepEqual(await sandbox.getMetrics(past), [])
})

test('a sandbox is paused, saved, forked and killed by its id', async () => {
  const { sandboxId } = kept(await Sandbox.create({ timeoutMs: 300_000 }))
  assert.equal(await Sandbox.pause(sandboxId), true)
  assert.equal(await Sandbox.pause(sandboxId), false)
  const again = await Sandbox.connect(sandboxId, { timeoutMs: 300_000 })
  await again.files.write('/dev/shm/kept', 'in memory')
  assert.equal(await Sandbox.betaPause(sandboxId), true)
  assert.equal(await again.isRunning(), false)
  await again.connect({ onResume: 'restore' })
  const saved = await Sandbox.createSnapshot(sandboxId, { name: 'js-named' })
  assert.deepEqual(await ids(Sandbox.listSnapshots({ name: 'js-named' })), [saved.snapshotId])
  assert.deepEqual(await ids(Sandbox.listSnapshots({ sandboxId, limit: 1 })), [saved.snapshotId])
  assert.deepEqual(await ids(Sandbox.listSnapshots({ name: 'js-none' })), [])
  const [fork] = (await Sandbox.fork(sandboxId, { timeoutMs: 300_000 })).map(kept)
  const copy = kept(await Sandbox.create(saved.snapshotId, { timeoutMs: 300_000 }))
  assert.deepEqual(await ids(Sandbox.list({ query: { template: saved.snapshotId } })), [copy.sandboxId])
  for (const one of [fork, copy]) {
    assert.equal(await one.files.read('/dev/shm/kept'), 'in memory')
    assert.equal(await Sandbox.kill(one.sandboxId), true)
  }
  assert.equal(await Sandbox.deleteSnapshot(saved.snapshotId), true)
  assert.equal(await Sandbox.kill(sandboxId), true)
  assert.equal(await Sandbox.kill(sandboxId), false)
  assert.equal(await again.isRunning(), false)
})

test('lists are filtered, ordered and paged', async () => {
  const other = kept(await Sandbox.create({ timeoutMs: 300_000, metadata: { lives: 'shared' } }))
  const both = [sandbox.sandboxId, other.sandboxId]
  const metadata = { lives: 'shared' }
  const found = ({ order, ...query }) => ids(Sandbox.list({ query: { metadata, ...query }, order }))
  assert.deepEqual(await found({ order: 'asc' }), both)
  assert.deepEqual(await found({}), both.toReversed())
  const { startedAt } = await other.getInfo()
  assert.deepEqual(await found({ startedAfter: startedAt }), [other.sandboxId])
  assert.deepEqual(await found({ startedAfter: new Date(Date.now() + 60_000) }), [])
  assert.deepEqual(await found({ template: 'base', order: 'asc' }), both)
  assert.deepEqual(await found({ template: 'js-none' }), [])
  await other.betaPause()
  assert.deepEqual(await found({ state: ['paused'] }), [other.sandboxId])
  assert.deepEqual(await found({ state: ['running', 'paused'], order: 'asc' }), both)

  // A page that is asked for by its token begins after what was shown, whatever has ended meanwhile.
  const first = { query: { metadata }, limit: 1 }
  const pages = Sandbox.list(first)
  assert.deepEqual((await pages.nextItems()).map((one) => one.sandboxId), [other.sandboxId])
  assert.equal(await other.kill(), true)
  assert.deepEqual(await ids(Sandbox.list({ ...first, nextToken: pages.nextToken })), [sandbox.sandboxId])
  assert.deepEqual((await pages.nextItems()).map((one) => one.sandboxId), [sandbox.sandboxId])
  assert.equal(pages.hasNext, false)
  await assert.rejects(pages.nextItems(), /No more items/)
})

test('a sandbox that does not exist is reported as missing', async () => {
  assert.equal(await Sandbox.kill(MISSING), false)
  assert.equal(await Sandbox.deleteSnapshot('js-none'), false)
  const { getInfo, getFullInfo, getMetrics, pause, betaPause, createSnapshot, fork, connect } = Sandbox
  for (const verb of [getInfo, getFullInfo, getMetrics, pause, betaPause, createSnapshot, fork, connect]) {
    await assert.rejects(verb.call(Sandbox, MISSING), SandboxNotFoundError, verb.name)
  }
  await assert.rejects(Sandbox.setTimeout(MISSING, 1000), SandboxNotFoundError)
  await assert.rejects(Sandbox.updateNetwork(MISSING, {}), SandboxNotFoundError)
})

test('a network is changed only to what it is', async () => {
  const isolated = kept(await Sandbox.create({ timeoutMs: 300_000, network: { denyOut: [ALL_TRAFFIC] } }))
  await sandbox.updateNetwork({})
  await Sandbox.updateNetwork(sandbox.sandboxId, { allowInternetAccess: true })
  await isolated.updateNetwork({ allowInternetAccess: false })
  await isolated.updateNetwork({ denyOut: ({ allTraffic }) => [allTraffic] })
  for (const [one, network] of [
    [sandbox, { allowInternetAccess: false }],
    [sandbox, { denyOut: [ALL_TRAFFIC] }],
    [sandbox, { denyOut: ['8.8.8.8'] }],
    [sandbox, { allowOut: ['example.org'], denyOut: [ALL_TRAFFIC] }],
    [sandbox, { egressProxy: { address: 'proxy.example.org:1080' } }],
    [isolated, {}],
    [isolated, { allowInternetAccess: true }],
  ]) {
    const reason = /^501: .*(network|traffic).* not implemented/
    await assert.rejects(one.updateNetwork(network), isRefused(reason), JSON.stringify(network))
  }
  assert.equal((await sandbox.getInfo()).allowInternetAccess, true)
  assert.equal((await isolated.getInfo()).allowInternetAccess, false)
})

// Asks port 8000 of a guest. `fetch` would resolve the name of the port, which this machine does not know.
async function ask(one, headers) {
  const { promise, resolve, reject } = Promise.withResolvers()
  get(process.env.E2B_SANDBOX_URL, { headers: { host: one.getHost(8000), ...headers } }, resolve).on('error', reject)
  const answer = await promise
  return { status: answer.statusCode, body: await text(answer) }
}

test('a port of a guest is reached by its name, with a token if it is not public', async () => {
  const closed = kept(await Sandbox.create({ timeoutMs: 300_000, network: { allowPublicTraffic: false } }))
  assert.equal(sandbox.getHost(8000), `8000-${sandbox.sandboxId}.localhost:${new URL(process.env.E2B_API_URL).port}`)
  assert.equal(sandbox.getMcpUrl(), `https://${sandbox.getHost(50005)}/mcp`)
  for (const one of [sandbox, closed]) {
    await one.files.write('/tmp/www/index.html', 'from the guest')
    await one.commands.run('python3 -m http.server 8000 --bind 127.0.0.1 --directory /tmp/www', { background: true })
  }
  await eventually(async () => (await ask(sandbox)).status === 200)
  assert.deepEqual(await ask(sandbox), { status: 200, body: 'from the guest' })
  assert.equal(sandbox.trafficAccessToken, undefined)
  const token = { 'e2b-traffic-access-token': closed.trafficAccessToken }
  await eventually(async () => (await ask(closed, token)).status === 200)
  assert.equal((await ask(closed)).status, 403)
  assert.equal(await closed.kill(), true)
  assert.equal((await ask(closed, token)).status, 502)
})

test('the token of an MCP gateway is read from the guest', async () => {
  await assert.rejects(sandbox.getMcpToken(), FileNotFoundError)
  await sandbox.files.write('/etc/mcp-gateway/.token', 'a token', { user: 'root' })
  assert.equal(await sandbox.getMcpToken(), 'a token')
})

test('a client has settings of its own', async () => {
  const { E2B_API_KEY: apiKey, E2B_API_URL: apiUrl, E2B_SANDBOX_URL: sandboxUrl } = process.env
  const client = new E2B({ apiKey, apiUrl, sandboxUrl })
  const stranger = new E2B({ apiKey: `e2b_${'0'.repeat(40)}`, apiUrl, sandboxUrl })
  const nowhere = new E2B({ apiKey, apiUrl: 'http://127.0.0.1:9', sandboxUrl })
  const own = await client.Sandbox.connect(sandbox.sandboxId)
  assert.equal((await own.commands.run('echo own')).stdout, 'own\n')
  assert.ok((await ids(client.Sandbox.list())).includes(sandbox.sandboxId))
  assert.equal(await client.Template.exists('base'), true)
  assert.ok(Array.isArray(await client.Volume.list()))
  for (const asked of [
    () => stranger.Sandbox.create(),
    () => stranger.Sandbox.list().nextItems(),
    () => stranger.Template.exists('base'),
    () => stranger.Volume.list(),
    () => stranger.Secret.exists('x'),
  ]) {
    const isUnknown = (error) => error instanceof AuthenticationError && /invalid API key/.test(error.message)
    await assert.rejects(asked, isUnknown)
  }
  await assert.rejects(nowhere.Sandbox.getInfo(sandbox.sandboxId), /fetch failed/)
})

test('what cannot be created is refused with the reason', async () => {
  await assert.rejects(Sandbox.create('js-none'), isRefused(/template "js-none" not found/))
  await assert.rejects(Sandbox.create({ mcp: { duckduckgo: {} } }), isRefused(/template "mcp-gateway" not found/))
  const filtered = { network: { denyOut: ['8.8.8.8'] } }
  await assert.rejects(Sandbox.create(filtered), isRefused(/^501: filtering outgoing traffic is not implemented/))
  const masked = { network: { maskRequestHost: 'localhost:${PORT}' } }
  await assert.rejects(Sandbox.create(masked), isRefused(/^501: rewriting requests to ports is not implemented/))
  const known = { iam: { tokens: { t: { audience: 'a', tokenType: 'JWT-SVID' } } } }
  await assert.rejects(Sandbox.create(known), isRefused(/^501: workload identity is not implemented/))
  await assert.rejects(Sandbox.create({ timeoutMs: -2000 }), isRefused(/^400: invalid timeout -2/))
  await assert.rejects(Sandbox.create({ lifecycle: { onTimeout: 'kill', autoResume: true } }), InvalidArgumentError)
  await assert.rejects(Sandbox.connect(MISSING, { onResume: 'never' }), InvalidArgumentError)
  await assert.rejects(Sandbox.create({ signal: AbortSignal.abort() }), { name: 'AbortError' })
})

test('a sandbox is paused at its end, and resumed by its client or by traffic', async () => {
  const lifecycle = { onTimeout: { action: 'pause' }, autoResume: true }
  const made = kept(await Sandbox.create({ timeoutMs: 300_000, lifecycle }))
  assert.deepEqual((await made.getInfo()).lifecycle, { onTimeout: 'pause', autoResume: true })
  await made.setTimeout(1000)
  await eventually(async () => (await made.getInfo()).state === 'paused')
  assert.equal((await made.commands.run('echo resumed')).stdout, 'resumed\n')
  const boot = async () => (await made.commands.run('cat /proc/sys/kernel/random/boot_id')).stdout
  const first = await boot()
  assert.equal(await made.pause({ keepMemory: false }), true)
  await made.connect({ timeoutMs: 300_000 })
  assert.notEqual(await boot(), first)
})
