// Volumes: their files through the API and in sandboxes, by E2B's JavaScript client.

import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import {
  AuthenticationError,
  Sandbox,
  SandboxError,
  Volume,
  VolumeError,
  VolumeFileType,
  VolumeNotFoundError,
  VolumePathNotFoundError,
} from 'e2b'

import { kept } from './kept.mjs'

let volume

before(async () => {
  volume = await Volume.create('js-data')
})

after(async () => {
  assert.equal(await Volume.destroy(volume.volumeId), true)
})

const isRefused = (reason) => (error) => error instanceof VolumeError && reason.test(error.message)

test('volumes are made, listed, joined and removed', async () => {
  const made = await Volume.create('js-other')
  const names = (await Volume.list()).map((one) => one.name)
  assert.ok(names.includes('js-data') && names.includes('js-other'), `${names}`)
  const { name, token } = await Volume.getInfo(made.volumeId)
  assert.deepEqual([name, token], ['js-other', made.token])
  assert.equal((await Volume.connect(made.volumeId)).token, made.token)
  await assert.rejects(Volume.create('js-other'), isRefused(/409: .*already/))
  await assert.rejects(Volume.create('../x'), isRefused(/400: invalid volume name/))
  assert.equal(await Volume.destroy(made.volumeId), true)
  assert.equal(await Volume.destroy(made.volumeId), false)
  await assert.rejects(Volume.getInfo(made.volumeId), VolumeNotFoundError)
  await assert.rejects(Volume.connect(made.volumeId), VolumeNotFoundError)
})

test('files of a volume are written, read, described, listed and removed', async () => {
  await assert.rejects(volume.writeFile('/a/b.txt', 'text'), VolumePathNotFoundError)
  const written = await volume.writeFile('/a/b.txt', 'ä€😀', { mode: 0o640, force: true })
  assert.deepEqual([written.path, written.size], ['/a/b.txt', 9])
  assert.deepEqual([written.type, written.mode], [VolumeFileType.FILE, 0o640])
  assert.equal(await volume.readFile('/a/b.txt'), 'ä€😀')
  const bytes = new Uint8Array(1_000_000).map((_, i) => i % 251)
  await volume.writeFile('buffer', bytes.buffer)
  await volume.writeFile('stream', new Blob([bytes]).stream())
  await volume.writeFile('empty', new Blob([]))
  for (const name of ['buffer', 'stream']) {
    assert.deepEqual(await volume.readFile(name, { format: 'bytes' }), bytes)
  }
  const blob = await volume.readFile('buffer', { format: 'blob' })
  assert.deepEqual(new Uint8Array(await blob.arrayBuffer()), bytes)
  const pieces = await Array.fromAsync(await volume.readFile('buffer', { format: 'stream' }))
  assert.deepEqual(new Uint8Array(Buffer.concat(pieces)), bytes)
  assert.equal(await volume.readFile('empty'), '')

  assert.equal((await volume.makeDir('/x/y', { force: true })).type, VolumeFileType.DIRECTORY)
  await assert.rejects(volume.makeDir('/x/y'), isRefused(/409: /))
  const paths = async (options) => (await volume.list('/', options)).map((one) => one.path)
  assert.deepEqual(await paths(), ['/a', '/buffer', '/empty', '/stream', '/x'])
  assert.ok((await paths({ depth: 2 })).includes('/a/b.txt'))
  const changed = await volume.updateMetadata('/a/b.txt', { mode: 0o600 })
  assert.deepEqual([changed.mode, (await volume.getInfo('/a/b.txt')).mode], [0o600, 0o600])
  assert.ok(changed.mtime instanceof Date && changed.mtime <= new Date())
  await assert.rejects(volume.updateMetadata('/a/b.txt', { uid: 0 }), isRefused(/another owner/))

  await volume.remove('/a')
  assert.equal(await volume.exists('/a/b.txt'), false)
  assert.equal(await volume.exists('/x/y'), true)
  const absent = '/a/b.txt'
  await assert.rejects(volume.readFile(absent), VolumePathNotFoundError)
  await assert.rejects(volume.readFile(absent, { format: 'stream' }), VolumePathNotFoundError)
  await assert.rejects(volume.getInfo(absent), VolumePathNotFoundError)
  await assert.rejects(volume.list(absent), VolumePathNotFoundError)
  await assert.rejects(volume.updateMetadata(absent, { mode: 0o600 }), VolumePathNotFoundError)
  await assert.rejects(volume.remove(absent), VolumePathNotFoundError)
  await assert.rejects(volume.readFile('/x/../../../etc/passwd'), isRefused(/400: /))
  await assert.rejects(volume.list('/', { token: 'wrong' }), AuthenticationError)
})

test('a sandbox has the files of its volume', async () => {
  await volume.writeFile('outside', 'from outside')
  const sandbox = kept(await Sandbox.create({ timeoutMs: 300_000, volumeMounts: { '/mnt/data': volume } }))
  assert.deepEqual((await sandbox.getInfo()).volumeMounts, [{ name: 'js-data', path: '/mnt/data' }])
  assert.equal(await sandbox.files.read('/mnt/data/outside'), 'from outside')
  await sandbox.commands.run('echo inside > /mnt/data/inside')
  assert.equal(await volume.readFile('inside'), 'inside\n')
  await assert.rejects(Volume.destroy(volume.volumeId), isRefused(/409: .*mounted/))
  const isUnknown = (error) => error instanceof SandboxError && /volume "js-none" not found/.test(error.message)
  await assert.rejects(Sandbox.create({ volumeMounts: { '/mnt/data': 'js-none' } }), isUnknown)
})
