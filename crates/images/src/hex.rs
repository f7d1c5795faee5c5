//! Bytes in hexadecimal.

/// Bytes in hexadecimal, as digests are written.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
