//! Text from other machines, made fit for a terminal.

/// How much of a foreign text is kept.
const LENGTH_MAX: usize = 300;

/// A short text without control characters.
pub(crate) fn cleaned(text: &str) -> String {
    text.chars()
        .take(LENGTH_MAX)
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}
