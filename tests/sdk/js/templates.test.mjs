// Templates: builds, their files, tags, by E2B's JavaScript client. `minFreeDiskMb` keeps the images small.

import assert from 'node:assert/strict'
import { chmod, mkdir, mkdtemp, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, before, test } from 'node:test'
import {
  ApiClient,
  BuildError,
  CommandExitError,
  ConnectionConfig,
  InvalidArgumentError,
  LogEntryEnd,
  LogEntryStart,
  Sandbox,
  SandboxError,
  Template,
  TemplateError,
  waitForFile,
  waitForPort,
  waitForProcess,
  waitForTimeout,
  waitForURL,
} from 'e2b'

import { eventually } from './eventually.mjs'
import { kept } from './kept.mjs'

const SMALL = { minFreeDiskMb: 64 }

let context

before(async () => {
  context = await mkdtemp(join(tmpdir(), 'sandtree-js-'))
  await mkdir(join(context, 'app/lib'), { recursive: true })
  for (const name of ['app/run.sh', 'app/lib/data', 'app/unwanted.log', 'note.txt']) {
    await writeFile(join(context, name), `#!/bin/sh\necho ${name}\n`)
  }
  await chmod(join(context, 'app/run.sh'), 0o755)
})

after(async () => {
  await rm(context, { recursive: true })
  // The client has no other way to remove a template.
  for (const name of ['js-app', 'js-docker']) assert.equal(await Sandbox.deleteSnapshot(name), true, name)
  assert.equal(await Sandbox.deleteSnapshot('js-app'), false)
  assert.equal(await Template.exists('js-app:v1'), false)
})

const isRefused = (kind, reason) => (error) => error instanceof kind && reason.test(error.message)

test('a template is built and sandboxes begin from it', async () => {
  const template = Template({ fileContextPath: context, fileIgnorePatterns: ['**/*.log'] })
    .fromBaseImage()
    .setWorkdir('/srv/app')
    .copy('app', '.')
    .copyItems([{ src: 'note.txt', dest: '/srv/notes/', mode: 0o640, user: 'root' }])
    .setEnvs({ GREETING: 'hello' })
    .makeDir('made', { mode: 0o700 })
    .rename('run.sh', 'made/moved.sh')
    .makeSymlink('made/moved.sh', 'link')
    .remove('lib', { recursive: true, force: true })
    .runCmd(['git init --quiet --bare /tmp/origin.git', 'echo "$GREETING by $(whoami) in $PWD" > said'])
    .gitClone('/tmp/origin.git', 'cloned')
    .setStartCmd('python3 -m http.server 8123', waitForURL('http://localhost:8123/said'))
  const log = []
  const options = { tags: ['stable'], cpuCount: 2, memoryMB: 640, onBuildLogs: (entry) => log.push(entry), ...SMALL }
  const built = await Template.build(template, 'js-app:v1', options)
  assert.deepEqual([built.templateId, built.tags.toSorted()], ['js-app', ['stable', 'v1']])
  assert.ok(log[0] instanceof LogEntryStart && log.at(-1) instanceof LogEntryEnd)
  assert.ok(log.some((entry) => entry.message.includes('WORKDIR /srv/app')), log.join('\n'))

  const sandbox = kept(await Sandbox.create('js-app:v1', { timeoutMs: 300_000 }))
  const { cpuCount, memoryMB } = await sandbox.getInfo()
  assert.deepEqual([cpuCount, memoryMB], [2, 640])
  const shown = await sandbox.commands.run('pwd; ls; cat said; ./link; stat -c %a made; curl -s localhost:8123/said')
  const said = 'hello by user in /srv/app\n'
  assert.equal(shown.stdout, `/srv/app\ncloned\nlink\nmade\nsaid\n${said}app/run.sh\n700\n${said}`)
  const note = await sandbox.commands.run('sudo stat -c "%a %U" /srv/notes/note.txt; echo $GREETING')
  assert.equal(note.stdout, '640 root\nhello\n')
  const ready = [waitForPort(8123), waitForProcess('python3'), waitForFile('/srv/app/said')]
  for (const one of ready) await sandbox.commands.run(one.getCmd())
  const nowhere = waitForURL('http://localhost:8123/none')
  for (const one of [waitForPort(8124), waitForProcess('none'), waitForFile('/none'), nowhere]) {
    await assert.rejects(sandbox.commands.run(one.getCmd()), CommandExitError)
  }
})

test('tags lead to builds', async () => {
  const [{ buildId }] = await Template.getTags('js-app')
  const tags = async () => (await Template.getTags('js-app')).map((one) => one.tag).sort()
  assert.equal(await Template.exists('js-app:stable'), true)
  assert.equal(await Template.aliasExists('base'), true)
  assert.equal(await Template.exists('js-app:none'), false)
  assert.deepEqual(await Template.assignTags('js-app:v1', ['default', 'v1.0']), { buildId, tags: ['default', 'v1.0'] })
  assert.deepEqual(await tags(), ['default', 'stable', 'v1', 'v1.0'])
  const { data } = await new ApiClient(new ConnectionConfig()).api.GET('/templates')
  const mine = data.find((one) => one.templateID === 'js-app')
  assert.deepEqual([mine.buildID, mine.cpuCount, mine.memoryMB], [buildId, 2, 640])
  assert.ok(mine.names.includes('js-app:v1.0'), `${mine.names}`)
  await Template.removeTags('js-app', ['stable', 'v1.0'])
  assert.deepEqual(await tags(), ['default', 'v1'])
  assert.equal(await Template.exists('js-app:stable'), false)
  await assert.rejects(Template.assignTags('js-app:none', 'x'), isRefused(TemplateError, /not found/))
  await assert.rejects(Template.assignTags('js-app:v1', '../x'), isRefused(TemplateError, /invalid template name/))
  await assert.rejects(Template.getTags('js-none'), isRefused(TemplateError, /not found/))
  await assert.rejects(Template.removeTags('js-none', 'x'), isRefused(TemplateError, /not found/))
})

test('a template of a Dockerfile is built in the background', async () => {
  const text = 'FROM debian:stable\nENV A=b\nWORKDIR /srv\nRUN echo "made with $A in $PWD by $(whoami)"\n'
  const template = Template().fromDockerfile(text)
  const started = await Template.buildInBackground(template, { alias: 'js-docker', skipCache: true, ...SMALL })
  const status = await eventually(async () => {
    const status = await Template.getBuildStatus(started)
    return !['building', 'waiting'].includes(status.status) && status
  }, 240)
  assert.equal(status.status, 'ready', JSON.stringify(status.reason))
  const { logEntries } = await Template.getBuildStatus(started, { logsOffset: status.logEntries.length })
  assert.deepEqual(logEntries, [])
  assert.ok(status.logEntries.some((entry) => entry.message === 'made with b in /srv by root'), `${status.logEntries}`)
})

test('a step that fails is reported with its output', async () => {
  const log = []
  const template = Template().fromDebianImage().runCmd('echo the cause >&2; exit 7')
  const building = Template.build(template, 'js-fails', { onBuildLogs: (entry) => log.push(entry), ...SMALL })
  await assert.rejects(building, isRefused(BuildError, /exit(ed)? .*7[^]*the cause/))
  assert.ok(log.some((entry) => entry.level === 'error'))
  assert.equal(await Template.exists('js-fails'), false)
})

test('what cannot be built is refused with the reason', async () => {
  const base = () => Template().fromTemplate('base')
  const refused = (template, reason, name = 'js-refused', options = {}) =>
    assert.rejects(Template.build(template, name, options), isRefused(BuildError, reason), `${reason}`)
  await refused(base(), /built-in image/, 'debian')
  await refused(base(), /invalid template name/, 'UPPER')
  await refused(base(), /cpuCount/, 'js-refused', { cpuCount: 1000 })
  await refused(Template().fromTemplate('js-none'), /template "js-none" not found/)
  const images = ['Ubuntu', 'Fedora', 'Alpine', 'Arch', 'Python', 'Node']
  for (const name of images) await refused(Template()[`from${name}Image`](), /not in the store/)
  const keys = { accessKeyId: 'a', secretAccessKey: 'b', region: 'c' }
  await refused(Template().fromAWSRegistry('r/i', keys), /^501: .*AWS or GCP/)
  await refused(Template().fromGCPRegistry('r/i', { serviceAccountJSON: {} }), /^501: .*AWS or GCP/)
  const unknown = { templateId: 'js-app', buildId: crypto.randomUUID() }
  await assert.rejects(Template.getBuildStatus(unknown), isRefused(BuildError, /^404: /))
  const empty = Template({ fileContextPath: context }).fromBaseImage().copy('none', '/')
  await assert.rejects(Template.build(empty, 'js-refused'), /No files found/)
  assert.throws(() => base().copy('/etc/passwd', '/'), TemplateError)
  assert.throws(() => base().copy('../x', '/'), TemplateError)
  assert.throws(() => Template().fromImage('x', { username: 'x' }), InvalidArgumentError)
  assert.throws(() => base().addMcpServer('exa'), BuildError)
  assert.throws(() => base().betaDevContainerPrebuild('.'), BuildError)
  assert.throws(() => base().betaSetDevContainerStart('.'), BuildError)
  await assert.rejects(Sandbox.create('js-refused'), isRefused(SandboxError, /template "js-refused" not found/))
})

test('a template is shown as a Dockerfile and as JSON', async () => {
  const template = Template()
    .fromImage('debian:stable', { username: 'someone', password: 'secret' })
    .setUser('root')
    .aptInstall(['git', 'less'], { noInstallRecommends: true, fixMissing: true })
    .pipInstall('numpy')
    .npmInstall('left-pad', { g: true })
    .bunInstall()
    .skipCache()
    .setEnvs({ A: 'b' })
    .setReadyCmd(waitForTimeout(2000))
  assert.deepEqual(Template.toDockerfile(template).split('\n').slice(0, -1), [
    'FROM debian:stable',
    'USER root',
    'RUN apt-get update && DEBIAN_FRONTEND=noninteractive DEBCONF_NOWARNINGS=yes ' +
      'apt-get install -y --no-install-recommends --fix-missing git less',
    'RUN pip install numpy',
    'RUN npm install -g left-pad',
    'RUN bun install',
    'ENV A=b',
  ])
  const shown = JSON.parse(await Template.toJSON(template))
  assert.deepEqual([shown.readyCmd, shown.fromImageRegistry.username], ['sleep 2', 'someone'])
  assert.deepEqual(shown.steps.map((step) => step.force), [false, false, false, false, false, true])
  assert.throws(() => Template.toDockerfile(Template().fromTemplate('base')), /Cannot convert/)
})
