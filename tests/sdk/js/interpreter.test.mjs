// Code in contexts, by E2B's JavaScript client of the code interpreter.

import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import { E2B, Sandbox } from '@e2b/code-interpreter'
import { InvalidArgumentError, NotFoundError, SandboxError, TimeoutError } from 'e2b'

let sandbox

before(async () => {
  sandbox = await Sandbox.create({ timeoutMs: 600_000, envs: { FOO: 'from create' } })
})

after(() => sandbox.kill())

test('results, logs and errors', async () => {
  const seen = []
  const done = await sandbox.runCode('x = 20\nprint("out")\nx + 1', { onStdout: (message) => seen.push(message.line) })
  assert.equal(done.text, '21')
  assert.deepEqual(done.logs.stdout, ['out\n'])
  assert.deepEqual(seen, ['out\n'])
  assert.equal((await sandbox.runCode('x * 2')).text, '40')
  const failed = await sandbox.runCode('1 / 0')
  assert.equal(failed.error.name, 'ZeroDivisionError')
  assert.match(failed.error.traceback, /division by zero/)
})

test('figures are pictures and charts', async () => {
  const { results } = await sandbox.runCode('import matplotlib.pyplot as plt\nplt.plot([1, 2], [3, 4])\nplt.show()')
  assert.equal(Buffer.from(results[0].png, 'base64').subarray(1, 4).toString(), 'PNG')
  assert.equal(results[0].chart.type, 'line')
  assert.deepEqual(results[0].chart.elements[0].points, [[1, 3], [2, 4]])
})

test('variables of the sandbox and of one execution', async () => {
  const code = 'import os\nos.environ.get("FOO"), os.environ.get("ONCE")'
  assert.equal((await sandbox.runCode(code)).text, "('from create', None)")
  assert.equal((await sandbox.runCode(code, { envs: { ONCE: '1' } })).text, "('from create', '1')")
})

test('contexts', async () => {
  const context = await sandbox.createCodeContext({ cwd: '/tmp', language: 'python' })
  assert.deepEqual([context.language, context.cwd], ['python', '/tmp'])
  assert.equal((await sandbox.runCode('import os\nos.getcwd()', { context })).text, '/tmp')
  const mine = (await sandbox.listCodeContexts()).find((one) => one.id === context.id)
  assert.deepEqual(mine, context)
  await sandbox.runCode('mine = 1', { context })
  await sandbox.restartCodeContext(context)
  assert.equal((await sandbox.runCode('mine', { context })).error.name, 'NameError')
  await sandbox.removeCodeContext(context.id)
  assert.ok(!(await sandbox.listCodeContexts()).some((one) => one.id === context.id))
  await assert.rejects(sandbox.runCode('1', { context }), NotFoundError)
  await assert.rejects(sandbox.restartCodeContext(context.id), NotFoundError)
  await assert.rejects(sandbox.removeCodeContext(context), NotFoundError)
})

test('each part of an execution is reported when it is there', async () => {
  const seen = []
  const code = `
import sys
from IPython.display import HTML, display
print("err", file=sys.stderr)
display(HTML("<b>"))
1 / 0`
  const done = await sandbox.runCode(code, {
    language: 'python',
    onStderr: (message) => seen.push([message.line, message.error]),
    onResult: (result) => seen.push(result.formats()),
    onError: (error) => seen.push(error.name),
  })
  assert.deepEqual(seen, [['err\n', true], ['html'], 'ZeroDivisionError'])
  assert.equal(done.text, undefined)
  assert.deepEqual(done.toJSON().logs, { stdout: [], stderr: ['err\n'] })
  assert.equal(done.results[0].toJSON().html, '<b>')
  const next = await sandbox.runCode('{"a": 1}')
  assert.equal(next.executionCount, done.executionCount + 1)
  assert.ok(next.results[0].isMainResult)
})

test('what cannot run is refused', async () => {
  // This client does not show the reason, which the answer has.
  const isRefused = (error) => error instanceof SandboxError && /^400 /.test(error.message)
  await assert.rejects(sandbox.runCode('1', { language: 'cobol' }), isRefused)
  await assert.rejects(sandbox.createCodeContext({ language: 'cobol' }), isRefused)
  await assert.rejects(sandbox.createCodeContext({ cwd: '/no/such' }), isRefused)
  const [context] = await sandbox.listCodeContexts()
  await assert.rejects(sandbox.runCode('1', { context, language: 'python' }), InvalidArgumentError)
})

test('a client with settings of its own runs code', async () => {
  const { E2B_API_KEY: apiKey, E2B_API_URL: apiUrl, E2B_SANDBOX_URL: sandboxUrl } = process.env
  const client = new E2B({ apiKey, apiUrl, sandboxUrl })
  const joined = await client.Sandbox.connect(sandbox.sandboxId)
  assert.equal((await joined.runCode('"joined"')).text, 'joined')
})

test('an execution that takes too long is interrupted', async () => {
  await assert.rejects(sandbox.runCode('import time\ntime.sleep(1000)', { timeoutMs: 2000 }), TimeoutError)
  assert.equal((await sandbox.runCode('"after"', { timeoutMs: 30_000 })).text, 'after')
})

test('a killed sandbox runs no code', async () => {
  assert.equal(await sandbox.kill(), true)
  await assert.rejects(sandbox.runCode('1'), TimeoutError)
  await assert.rejects(sandbox.listCodeContexts(), TimeoutError)
})
