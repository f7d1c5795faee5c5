// Code in contexts, by E2B's JavaScript client of the code interpreter.

import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import { Sandbox } from '@e2b/code-interpreter'
import { NotFoundError, TimeoutError } from 'e2b'

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
  const context = await sandbox.createCodeContext({ cwd: '/tmp' })
  assert.equal((await sandbox.runCode('import os\nos.getcwd()', { context })).text, '/tmp')
  assert.ok((await sandbox.listCodeContexts()).some((one) => one.id === context.id))
  await sandbox.runCode('mine = 1', { context })
  await sandbox.restartCodeContext(context)
  assert.equal((await sandbox.runCode('mine', { context })).error.name, 'NameError')
  await sandbox.removeCodeContext(context)
  await assert.rejects(sandbox.runCode('1', { context }), NotFoundError)
})

test('an execution that takes too long is interrupted', async () => {
  await assert.rejects(sandbox.runCode('import time\ntime.sleep(1000)', { timeoutMs: 2000 }), TimeoutError)
  assert.equal((await sandbox.runCode('"after"', { timeoutMs: 30_000 })).text, 'after')
})
