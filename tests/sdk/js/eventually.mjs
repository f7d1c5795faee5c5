// Waits for a visible event.
export async function eventually(condition, seconds = 60) {
  const end = Date.now() + seconds * 1000
  for (;;) {
    const found = await condition()
    if (found) return found
    if (Date.now() > end) throw new Error('it never became true')
    await new Promise((resolve) => setTimeout(resolve, 50))
  }
}
