// Repositories in a guest, by E2B's JavaScript client. All remotes are in the guest.

import assert from 'node:assert/strict'
import { before, test } from 'node:test'
import { CommandExitError, GitAuthError, GitUpstreamError, InvalidArgumentError, Sandbox } from 'e2b'

import { kept } from './kept.mjs'

let sandbox
let git

const ORIGIN = '/home/user/origin.git'
const WORK = '/home/user/work'
const CLONE = '/home/user/clone'

before(async () => {
  sandbox = kept(await Sandbox.create({ timeoutMs: 600_000, allowInternetAccess: false }))
  git = sandbox.git
})

test('a repository is made, configured and committed to', async () => {
  await git.init(WORK, { initialBranch: 'main' })
  await git.configureUser('Someone', 'someone@example.com')
  assert.equal(await git.getConfig('user.name'), 'Someone')
  await git.setConfig('pull.rebase', 'true', { scope: 'local', path: WORK })
  assert.equal(await git.getConfig('pull.rebase', { scope: 'local', path: WORK }), 'true')
  await sandbox.files.writeFiles([{ path: `${WORK}/a`, data: '1' }, { path: `${WORK}/b`, data: '1' }])
  await git.add(WORK, { files: ['a'] })
  const status = await git.status(WORK)
  assert.deepEqual([status.currentBranch, status.stagedCount, status.untrackedCount], ['main', 1, 1])
  await git.add(WORK)
  await git.commit(WORK, 'first', { authorName: 'Other', authorEmail: 'other@example.com' })
  assert.equal((await sandbox.commands.run(`git -C ${WORK} log --format='%an: %s'`)).stdout, 'Other: first\n')
  await assert.rejects(git.commit(WORK, 'nothing'), CommandExitError)
})

test('changes are taken back', async () => {
  await sandbox.files.write(`${WORK}/a`, '2')
  await git.add(WORK)
  await git.restore(WORK, { paths: ['a'], staged: true })
  const { hasStaged, fileStatus } = await git.status(WORK)
  assert.deepEqual([hasStaged, fileStatus.map((one) => one.status)], [false, ['modified']])
  await git.restore(WORK, { paths: ['a'] })
  assert.equal(await sandbox.files.read(`${WORK}/a`), '1')
  await sandbox.files.write(`${WORK}/a`, '3')
  await git.reset(WORK, { mode: 'hard', target: 'HEAD' })
  assert.equal(await sandbox.files.read(`${WORK}/a`), '1')
})

test('branches are made, left and removed', async () => {
  await git.createBranch(WORK, 'topic')
  assert.deepEqual(await git.branches(WORK), { branches: ['main', 'topic'], currentBranch: 'topic' })
  await assert.rejects(git.deleteBranch(WORK, 'topic'), CommandExitError)
  await git.checkoutBranch(WORK, 'main')
  await git.deleteBranch(WORK, 'topic', { force: true })
})

test('commits go to another repository and come from it', async () => {
  await git.init(ORIGIN, { bare: true, initialBranch: 'main' })
  assert.equal(await git.remoteGet(WORK, 'origin'), undefined)
  await git.remoteAdd(WORK, 'origin', '/nowhere')
  await git.remoteAdd(WORK, 'origin', ORIGIN, { overwrite: true })
  assert.equal(await git.remoteGet(WORK, 'origin'), ORIGIN)
  await assert.rejects(git.push(WORK, { setUpstream: false }), GitUpstreamError)
  await assert.rejects(git.pull(WORK), GitUpstreamError)
  await git.push(WORK, { remote: 'origin', branch: 'main' })
  await git.clone(ORIGIN, { path: CLONE, branch: 'main' })
  await git.commit(CLONE, 'from the clone', { allowEmpty: true })
  const { upstream, ahead } = await git.status(CLONE)
  assert.deepEqual([upstream, ahead], ['origin/main', 1])
  await git.push(CLONE)
  await git.pull(WORK)
  assert.equal((await sandbox.commands.run(`git -C ${WORK} log -1 --format=%s`)).stdout, 'from the clone\n')
})

test('a password is missing, or is stored and sent', async () => {
  const server = `
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(404 if 'Authorization' in self.headers else 401)
        self.send_header('WWW-Authenticate', 'Basic realm="x"')
        self.end_headers()
server = http.server.HTTPServer(('127.0.0.1', 8418), Handler)
print('ready', flush=True)
server.serve_forever()`
  await sandbox.files.write('/home/user/server.py', server)
  const { promise: ready, resolve } = Promise.withResolvers()
  const running = await sandbox.commands.run('python3 server.py', { background: true, onStdout: resolve })
  await ready
  const url = 'http://127.0.0.1:8418/x.git'
  await assert.rejects(git.clone(url), GitAuthError)
  const known = { username: 'someone', password: 'secret', host: '127.0.0.1:8418', protocol: 'http' }
  await git.dangerouslyAuthenticate(known)
  await assert.rejects(git.clone(url), (error) => error instanceof CommandExitError && /not found/.test(error.stderr))
  assert.equal(await running.kill(), true)
  await assert.rejects(running.wait(), CommandExitError)
})

test('arguments that mean nothing are refused', async () => {
  await assert.rejects(git.setConfig('', 'x'), InvalidArgumentError)
  await assert.rejects(git.getConfig('a.b', { scope: 'local' }), InvalidArgumentError)
  await assert.rejects(git.configureUser('', ''), InvalidArgumentError)
  await assert.rejects(git.restore(WORK, { paths: [] }), InvalidArgumentError)
  await assert.rejects(git.reset(WORK, { mode: 'none' }), InvalidArgumentError)
  await assert.rejects(git.remoteAdd(WORK, '', ''), InvalidArgumentError)
  await assert.rejects(git.clone(ORIGIN, { password: 'x' }), InvalidArgumentError)
  await assert.rejects(git.push(WORK, { password: 'x' }), InvalidArgumentError)
  await assert.rejects(git.dangerouslyAuthenticate({ username: '', password: '' }), InvalidArgumentError)
})
