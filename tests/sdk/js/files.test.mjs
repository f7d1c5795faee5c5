// Files of a guest, by E2B's JavaScript client.

import assert from 'node:assert/strict'
import { before, test } from 'node:test'
import {
  AuthenticationError,
  FileNotFoundError,
  FilesystemEventType,
  FileType,
  getSignature,
  InvalidArgumentError,
  NotFoundError,
  Sandbox,
  SandboxNotFoundError,
  TimeoutError,
} from 'e2b'

import { eventually } from './eventually.mjs'
import { kept } from './kept.mjs'

let sandbox
let files

before(async () => {
  sandbox = kept(await Sandbox.create({ timeoutMs: 600_000 }))
  files = sandbox.files
})

const BYTES = new Uint8Array(1_000_000).map((_, i) => i % 251)

test('every kind of content is written and read', async () => {
  const sent = { buffer: BYTES.buffer, blob: new Blob([BYTES]), stream: new Blob([BYTES]).stream() }
  for (const [name, data] of Object.entries(sent)) {
    const written = await files.write(`kinds/${name}`, data)
    assert.deepEqual([written.path, written.name, written.type], [`/home/user/kinds/${name}`, name, FileType.FILE])
  }
  await files.write('kinds/gzip', BYTES.buffer, { gzip: true })
  await files.write('kinds/octets', BYTES.buffer, { useOctetStream: true })
  for (const name of ['buffer', 'blob', 'stream', 'gzip', 'octets']) {
    assert.deepEqual(await files.read(`kinds/${name}`, { format: 'bytes', gzip: name === 'gzip' }), BYTES, name)
  }
  const blob = await files.read('kinds/blob', { format: 'blob' })
  assert.deepEqual(new Uint8Array(await blob.arrayBuffer()), BYTES)
  const pieces = await Array.fromAsync(await files.read('kinds/blob', { format: 'stream' }))
  assert.deepEqual(new Uint8Array(Buffer.concat(pieces)), BYTES)
  await files.write('kinds/empty', '')
  assert.equal(await files.read('kinds/empty'), '')
  assert.deepEqual(await files.read('kinds/empty', { format: 'bytes' }), new Uint8Array())
})

test('several files are written at once', async () => {
  assert.deepEqual(await files.writeFiles([]), [])
  const names = ['many/a', 'many/"quoted" ä', 'many/deep/c']
  const written = await files.writeFiles(names.map((path) => ({ path, data: path })), { metadata: { by: 'a test' } })
  assert.deepEqual(written.map((one) => one.path), names.map((name) => `/home/user/${name}`))
  for (const name of names) {
    assert.equal(await files.read(name), name)
    assert.deepEqual((await files.getInfo(name)).metadata, { by: 'a test' })
  }
})

test('files are described', async () => {
  await files.writeFiles([{ path: 'tree/file', data: '12345' }, { path: 'tree/sub/deep', data: '' }])
  await sandbox.commands.run('chmod 640 tree/file && ln -s file tree/link')
  const file = await files.getInfo('tree/file')
  assert.deepEqual([file.name, file.path, file.size], ['file', '/home/user/tree/file', 5])
  assert.deepEqual([file.type, file.mode, file.permissions], [FileType.FILE, 0o640, '-rw-r-----'])
  assert.deepEqual([file.owner, file.group], ['user', 'user'])
  assert.ok(file.modifiedTime instanceof Date && Math.abs(file.modifiedTime - Date.now()) < 600_000)
  assert.equal((await files.getInfo('tree')).type, FileType.DIR)
  assert.equal((await files.getInfo('tree/link')).symlinkTarget, '/home/user/tree/file')
  const deep = await files.list('tree', { depth: 2 })
  assert.deepEqual(deep.map((one) => one.path.slice('/home/user/tree/'.length)), ['file', 'link', 'sub', 'sub/deep'])
  const moved = await files.rename('tree/file', 'other/place')
  assert.deepEqual([moved.path, await files.exists('tree/file')], ['/home/user/other/place', false])
  assert.equal(await files.makeDir('of-root', { user: 'root' }), true)
  assert.equal((await files.getInfo('/root/of-root')).owner, 'root')
})

test('what is missing or of another kind is refused', async () => {
  await files.write('plain', 'x')
  for (const format of ['text', 'bytes', 'blob', 'stream']) {
    await assert.rejects(files.read('none', { format }), FileNotFoundError)
  }
  await assert.rejects(files.getInfo('none'), FileNotFoundError)
  await assert.rejects(files.list('none'), NotFoundError)
  await assert.rejects(files.rename('none', 'other'), FileNotFoundError)
  await assert.rejects(files.watchDir('none', () => {}), NotFoundError)
  assert.equal(await files.exists('none'), false)
  await files.remove('none')
  await assert.rejects(files.read('/tmp'), InvalidArgumentError)
  await assert.rejects(files.write('/tmp', 'x', { useOctetStream: true }), InvalidArgumentError)
  await assert.rejects(files.list('plain'), InvalidArgumentError)
  await assert.rejects(files.list('/tmp', { depth: 0 }), InvalidArgumentError)
  await assert.rejects(files.makeDir('plain'), InvalidArgumentError)
  await assert.rejects(files.watchDir('plain', () => {}), InvalidArgumentError)
  await assert.rejects(files.write('plain', 'x', { metadata: { 'no token': 'x' } }), InvalidArgumentError)
  await assert.rejects(files.read('plain', { user: 'nobody-here' }), AuthenticationError)
  await assert.rejects(files.list('/tmp', { user: 'nobody-here' }), AuthenticationError)
  await assert.rejects(files.read('plain', { signal: AbortSignal.abort() }), { name: 'AbortError' })
})

test('watches tell of each kind of change', async () => {
  await files.makeDir('watched')
  const seen = []
  const watch = await files.watchDir('watched', (event) => seen.push(event), { includeEntry: true, timeoutMs: 0 })
  await sandbox.commands.run('cd watched && echo 1 > a && chmod 600 a && mv a b && rm b')
  await eventually(() => seen.some((event) => event.type === FilesystemEventType.REMOVE))
  const told = new Set(seen.map((event) => `${event.type} ${event.name}`))
  const { CREATE, WRITE, CHMOD, RENAME, REMOVE } = FilesystemEventType
  const expected = [`${CREATE} a`, `${WRITE} a`, `${CHMOD} a`, `${RENAME} a`, `${CREATE} b`, `${REMOVE} b`]
  assert.deepEqual([...told].sort(), expected.sort())
  await watch.stop()

  const ended = Promise.withResolvers()
  const short = { timeoutMs: 500, onExit: ended.resolve }
  await files.watchDir('watched', () => {}, short)
  assert.ok((await ended.promise) instanceof TimeoutError)

  const entries = []
  const second = await files.watchDir('watched', (event) => entries.push(event.entry), { includeEntry: true })
  await files.write('watched/c', '12345')
  const whole = await eventually(() => entries.find((entry) => entry?.size === 5))
  assert.deepEqual([whole.path, whole.type], ['/home/user/watched/c', FileType.FILE])
  await second.stop()
})

test('addresses for one file are signed', async () => {
  const upload = await sandbox.uploadUrl('signed')
  const form = new FormData()
  form.append('file', new Blob(['by address']), 'x')
  assert.equal((await fetch(upload, { method: 'POST', body: form })).status, 200)
  assert.equal(await files.read('signed'), 'by address')
  const download = await sandbox.downloadUrl('signed', { user: 'user', useSignatureExpiration: 60 })
  assert.equal(await (await fetch(download)).text(), 'by address')
  const late = await fetch(await sandbox.downloadUrl('signed', { useSignatureExpiration: -60 }))
  assert.deepEqual([late.status, (await late.json()).message], [401, 'signature is already expired'])
  for (const wrong of [upload, download.replace('path=signed', 'path=plain'), download.split('&signature')[0]]) {
    assert.equal((await fetch(wrong)).status, 401)
  }
  const forged = await getSignature({ path: 'signed', operation: 'read', user: undefined, envdAccessToken: 'wrong' })
  const url = new URL(await sandbox.downloadUrl('signed'))
  url.searchParams.set('signature', forged.signature)
  assert.equal((await fetch(url)).status, 401)
})

test('a watch survives a pause', async () => {
  await files.makeDir('kept')
  const seen = []
  const noted = { timeoutMs: 0, onExit: () => seen.push('the end') }
  const watch = await files.watchDir('kept', (event) => seen.push(event.name), noted)
  await files.write('kept/before', 'x')
  await sandbox.pause()
  await assert.rejects(files.list('/tmp'), TimeoutError)
  await assert.rejects(files.read('kept/before'), TimeoutError)
  await assert.rejects(files.watchDir('/tmp', () => {}), SandboxNotFoundError)
  await sandbox.connect()
  await files.write('kept/after', 'x')
  await eventually(() => seen.includes('before') && seen.includes('after'))
  assert.ok(!seen.includes('the end'))
  await watch.stop()
})
