// Sandboxes, commands, files and terminals, by E2B's JavaScript client.

import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import {
  CommandExitError,
  FileNotFoundError,
  FilesystemEventType,
  NotFoundError,
  Sandbox,
  SandboxNotFoundError,
  TimeoutError,
} from 'e2b'

import { eventually } from './eventually.mjs'

let sandbox

before(async () => {
  sandbox = await Sandbox.create({ timeoutMs: 600_000, metadata: { by: 'javascript' }, envs: { FOO: 'from create' } })
})

after(async () => {
  assert.equal(await sandbox.kill(), true)
  assert.equal(await sandbox.kill(), false)
})

async function all(paginator) {
  const found = []
  while (paginator.hasNext) found.push(...(await paginator.nextItems()))
  return found
}

test('a sandbox is described, listed and joined', async () => {
  const info = await sandbox.getInfo()
  assert.equal(info.sandboxId, sandbox.sandboxId)
  assert.deepEqual(info.metadata, { by: 'javascript' })
  assert.equal(info.state, 'running')
  assert.equal(await sandbox.isRunning(), true)
  const listed = await all(Sandbox.list({ query: { metadata: { by: 'javascript' } } }))
  assert.deepEqual(listed.map((one) => one.sandboxId), [sandbox.sandboxId])
  const again = await Sandbox.connect(sandbox.sandboxId)
  assert.equal((await again.commands.run('echo joined')).stdout, 'joined\n')
  const before = info.endAt.getTime()
  await sandbox.setTimeout(1_200_000)
  assert.ok((await sandbox.getInfo()).endAt.getTime() > before)
  assert.ok(Array.isArray(await sandbox.getMetrics()))
  await assert.rejects(Sandbox.connect('i0123456789abcdef'), NotFoundError)
  await assert.rejects(Sandbox.getInfo('i0123456789abcdef'), SandboxNotFoundError)
})

test('commands have output, exit codes and settings', async () => {
  const done = await sandbox.commands.run('echo out; echo err >&2; echo $FOO; pwd; whoami')
  assert.equal(done.stdout, 'out\nfrom create\n/home/user\nuser\n')
  assert.equal(done.stderr, 'err\n')
  const own = await sandbox.commands.run('pwd; echo $FOO; whoami', { cwd: '/tmp', envs: { FOO: 'own' }, user: 'root' })
  assert.equal(own.stdout, '/tmp\nown\nroot\n')
  await assert.rejects(sandbox.commands.run('exit 3'), (error) => error instanceof CommandExitError && error.exitCode === 3)
  const seen = []
  await sandbox.commands.run('for i in 1 2 3; do echo $i; sleep 0.3; done', { onStdout: (text) => seen.push(text) })
  assert.equal(seen.join(''), '1\n2\n3\n')
  assert.ok(seen.length > 1)
  await assert.rejects(sandbox.commands.run('sleep 600', { timeoutMs: 1000 }), TimeoutError)
})

test('commands run in the background', async () => {
  const command = await sandbox.commands.run('read line; echo got $line; exit 7', { background: true, stdin: true })
  assert.ok((await sandbox.commands.list()).some((one) => one.pid === command.pid))
  const joined = await sandbox.commands.connect(command.pid)
  await sandbox.commands.sendStdin(command.pid, 'hello\n')
  await assert.rejects(joined.wait(), (error) => error.exitCode === 7 && error.stdout === 'got hello\n')
  const other = await sandbox.commands.run('sleep 600', { background: true })
  assert.equal(await sandbox.commands.kill(other.pid), true)
  await assert.rejects(other.wait(), CommandExitError)
  assert.equal(await sandbox.commands.kill(999_999), false)
})

test('files are written, read, listed, moved and removed', async () => {
  const { files } = sandbox
  await files.write('/home/user/js/a.txt', 'ä€😀')
  assert.equal(await files.read('/home/user/js/a.txt'), 'ä€😀')
  const bytes = new Uint8Array(1_000_000).map((_, i) => i % 251)
  await files.write('/home/user/js/b.bin', bytes.buffer)
  assert.deepEqual(await files.read('/home/user/js/b.bin', { format: 'bytes' }), bytes)
  await files.write([{ path: '/home/user/js/c', data: '1' }, { path: '/home/user/js/d', data: '2' }])
  assert.deepEqual((await files.list('/home/user/js')).map((one) => one.name).sort(), ['a.txt', 'b.bin', 'c', 'd'])
  assert.equal((await files.getInfo('/home/user/js/b.bin')).size, 1_000_000)
  await files.rename('/home/user/js/c', '/home/user/js/e')
  assert.equal(await files.exists('/home/user/js/c'), false)
  assert.equal(await files.makeDir('/home/user/js/sub'), true)
  assert.equal(await files.makeDir('/home/user/js/sub'), false)
  await files.remove('/home/user/js/e')
  await assert.rejects(files.read('/home/user/js/e'), FileNotFoundError)
  const link = await sandbox.downloadUrl('/home/user/js/a.txt')
  assert.equal(await (await fetch(link)).text(), 'ä€😀')
})

test('directories are watched', async () => {
  await sandbox.files.makeDir('/home/user/watched/deep')
  const events = []
  const watch = await sandbox.files.watchDir('/home/user/watched', (event) => events.push(event), { recursive: true })
  await sandbox.files.write('/home/user/watched/deep/new', 'x')
  const isWrite = (event) => event.type === FilesystemEventType.WRITE && event.name === 'deep/new'
  await eventually(() => events.some(isWrite))
  await watch.stop()
})

test('terminals', async () => {
  const seen = []
  const terminal = await sandbox.pty.create({ cols: 80, rows: 24, onData: (data) => seen.push(Buffer.from(data)) })
  await sandbox.pty.resize(terminal.pid, { cols: 123, rows: 40 })
  await sandbox.pty.sendInput(terminal.pid, new TextEncoder().encode('stty size; exit 5\n'))
  await assert.rejects(terminal.wait(), (error) => error.exitCode === 5)
  assert.match(Buffer.concat(seen).toString(), /40 123/)
})

test('pause, snapshots and forks keep memory', async () => {
  await sandbox.files.write('/dev/shm/kept', 'in memory')
  assert.equal(await sandbox.pause(), true)
  assert.equal((await sandbox.getInfo()).state, 'paused')
  await sandbox.connect()
  assert.equal(await sandbox.files.read('/dev/shm/kept'), 'in memory')

  const snapshot = await sandbox.createSnapshot()
  const listed = await all(sandbox.listSnapshots())
  assert.deepEqual(listed.map((one) => one.snapshotId), [snapshot.snapshotId])
  const copy = await Sandbox.create(snapshot.snapshotId, { timeoutMs: 300_000 })
  assert.equal(await copy.files.read('/dev/shm/kept'), 'in memory')
  await copy.kill()
  assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), true)
  assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), false)

  const forks = await sandbox.fork({ count: 2, timeoutMs: 300_000 })
  assert.equal(forks.length, 2)
  for (const fork of forks) {
    assert.ok(fork instanceof Sandbox, `${fork}`)
    assert.equal(await fork.files.read('/dev/shm/kept'), 'in memory')
    await fork.kill()
  }
})
