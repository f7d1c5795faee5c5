// Commands and terminals of a guest, by E2B's JavaScript client.

import assert from 'node:assert/strict'
import { before, test } from 'node:test'
import {
  AuthenticationError,
  CommandExitError,
  InvalidArgumentError,
  NotFoundError,
  Sandbox,
  SandboxError,
  SandboxNotFoundError,
  TimeoutError,
} from 'e2b'

import { eventually } from './eventually.mjs'
import { kept } from './kept.mjs'

let sandbox
let commands
let pty

before(async () => {
  sandbox = kept(await Sandbox.create({ timeoutMs: 600_000 }))
  commands = sandbox.commands
  pty = sandbox.pty
})

const NONE = 999_999
const bytes = (text) => new TextEncoder().encode(text)

test('input reaches a command until it is closed', async () => {
  assert.equal(commands.supportsStdinClose, true)
  const command = await commands.run('cat; echo end', { background: true, stdin: true })
  await command.sendStdin('by its handle, ')
  await commands.sendStdin(command.pid, bytes('as bytes\n'))
  await command.closeStdin()
  assert.equal((await command.wait()).stdout, 'by its handle, as bytes\nend\n')
  const counting = await commands.run('wc -c', { background: true, stdin: true })
  await commands.sendStdin(counting.pid, 'x'.repeat(100_000))
  await commands.closeStdin(counting.pid)
  assert.equal((await counting.wait()).stdout, '100000\n')
})

test('a command is described, left, joined and killed', async () => {
  const options = { background: true, stdin: true, cwd: '/tmp', envs: { MINE: 'own' } }
  const begun = await commands.run('read line; echo out $line; echo err >&2; exit 3', options)
  const listed = (await commands.list()).find((one) => one.pid === begun.pid)
  assert.deepEqual([listed.cmd, listed.cwd, listed.envs], ['/bin/bash', '/tmp', { MINE: 'own' }])
  assert.match(listed.args.at(-1), /^read line/)
  await begun.disconnect()
  const seen = []
  const note = (text) => seen.push(text)
  const joined = await commands.connect(begun.pid, { onStdout: note, onStderr: note })
  assert.equal(joined.exitCode, undefined)
  await joined.sendStdin('typed\n')
  await assert.rejects(joined.wait(), (error) => error instanceof CommandExitError && error.stderr === 'err\n')
  assert.deepEqual([joined.exitCode, joined.stdout, joined.stderr], [3, 'out typed\n', 'err\n'])
  assert.deepEqual(seen.sort(), ['err\n', 'out typed\n'])
  const other = await commands.run('sleep 600', { background: true })
  assert.equal(await other.kill(), true)
  await assert.rejects(other.wait(), (error) => error.exitCode === -1 && error.error === 'signal: killed')
  assert.equal(await other.kill(), false)
})

test('a command that cannot run is refused with the reason', async () => {
  await assert.rejects(commands.run('true', { cwd: '/no/such' }), (error) => {
    return error instanceof InvalidArgumentError && /cwd '\/no\/such' does not exist/.test(error.message)
  })
  await assert.rejects(commands.run('true', { user: 'nobody-here' }), AuthenticationError)
  const isUnknown = (error) => error.exitCode === 127 && /not found/.test(error.stderr)
  await assert.rejects(commands.run('no-such-program'), isUnknown)
  const deaf = await commands.run('sleep 600', { background: true })
  await assert.rejects(commands.sendStdin(deaf.pid, 'x'), SandboxError)
  await deaf.kill()
  await assert.rejects(commands.connect(NONE), NotFoundError)
  await assert.rejects(commands.sendStdin(NONE, 'x'), NotFoundError)
  await assert.rejects(commands.closeStdin(NONE), NotFoundError)
})

test('a client that goes away leaves its command, which others list and kill', async () => {
  const leaving = new AbortController()
  const command = await commands.run('sleep 600', { background: true, signal: leaving.signal })
  leaving.abort()
  await assert.rejects(command.wait())
  assert.ok((await commands.list()).some((one) => one.pid === command.pid))
  assert.equal(await commands.kill(command.pid), true)
  await eventually(async () => !(await commands.list()).some((one) => one.pid === command.pid))
})

test('a terminal is left, joined, resized and ended', async () => {
  const place = { cwd: '/tmp', envs: { MINE: 'variable' }, user: 'root' }
  const begun = await pty.create({ cols: 80, rows: 24, onData: () => {}, ...place })
  await begun.disconnect()
  let shown = ''
  const joined = await pty.connect(begun.pid, { onData: (data) => (shown += Buffer.from(data)) })
  await pty.resize(begun.pid, { cols: 97, rows: 31 })
  await pty.sendInput(begun.pid, bytes('stty size; pwd; echo $MINE; whoami; exit 5\n'))
  await assert.rejects(joined.wait(), (error) => error.exitCode === 5)
  for (const text of ['31 97', '/tmp', 'variable', 'root']) assert.match(shown, new RegExp(`^${text}\r$`, 'm'))
  const other = await pty.create({ cols: 80, rows: 24, onData: () => {} })
  assert.equal(await pty.kill(other.pid), true)
  await assert.rejects(other.wait(), CommandExitError)
  assert.equal(await pty.kill(other.pid), false)
  assert.equal(await pty.kill(NONE), false)
  await assert.rejects(pty.connect(NONE, { onData: () => {} }), NotFoundError)
  await assert.rejects(pty.sendInput(NONE, bytes('x')), NotFoundError)
  await assert.rejects(pty.resize(NONE, { cols: 1, rows: 1 }), NotFoundError)
})

test('a killed sandbox runs no command', async () => {
  const own = kept(await Sandbox.create({ timeoutMs: 300_000 }))
  assert.equal(await own.kill(), true)
  await assert.rejects(own.commands.run('true'), SandboxNotFoundError)
  await assert.rejects(own.pty.create({ cols: 80, rows: 24, onData: () => {} }), SandboxNotFoundError)
  await assert.rejects(own.commands.list(), TimeoutError)
})
