import { after } from 'node:test'

const all = []

// Kills a sandbox at the end of the file that made it, also if a test failed.
export function kept(sandbox) {
  all.push(sandbox)
  return sandbox
}

after(async () => {
  for (const sandbox of all) await sandbox.kill()
})
