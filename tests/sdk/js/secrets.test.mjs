// Secrets, which there are none of, by E2B's JavaScript client.

import assert from 'node:assert/strict'
import { test } from 'node:test'
import { InvalidArgumentError, Secret, SecretError, SecretNotFoundError } from 'e2b'

test('secrets are refused with the reason', async () => {
  for (const asked of [
    () => Secret.create('name', 'value', { metadata: { a: 'b' } }),
    () => Secret.update('name', 'value'),
    () => Secret.getInfo('name'),
    () => Secret.exists('name'),
    () => Secret.destroy('name'),
    () => Secret.list({ limit: 1 }).nextItems(),
  ]) {
    await assert.rejects(asked, (error) => {
      // A secret that is missing among others would be something else.
      assert.ok(error instanceof SecretError && !(error instanceof SecretNotFoundError), `${asked}: ${error}`)
      assert.match(error.message, /^501: .*secret/i)
      return true
    })
  }
})

test('placeholders of secrets and tokens are texts of the client', () => {
  assert.equal(Secret.fill('name'), '${e2b.secrets.name}')
  assert.throws(() => Secret.fill('no {name}'), InvalidArgumentError)
  const token = { audience: 'a', tokenType: 'JWT-SVID' }
  assert.deepEqual(Secret.iamToken(token), token)
})
