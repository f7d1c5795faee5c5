//! CRC-32C as ext4 uses it: the caller passes the register in and gets it back, without inversion.
//! Eight bytes are processed at a time.

const POLYNOMIAL: u32 = 0x82f6_3b78;
static TABLES: [[u32; 256]; 8] = tables();

const fn tables() -> [[u32; 256]; 8] {
    let mut tables = [[0; 256]; 8];
    let mut index = 0;
    while index < 256 {
        let mut value = index as u32;
        let mut bit = 0;
        while bit < 8 {
            value = if value & 1 == 1 {
                value >> 1 ^ POLYNOMIAL
            } else {
                value >> 1
            };
            bit += 1;
        }
        tables[0][index] = value;
        index += 1;
    }
    let mut entry = 256;
    while entry < 8 * 256 {
        let before = tables[entry / 256 - 1][entry % 256];
        tables[entry / 256][entry % 256] = before >> 8 ^ tables[0][(before & 0xff) as usize];
        entry += 1;
    }
    tables
}

pub(crate) fn crc32c(register: u32, bytes: &[u8]) -> u32 {
    let (eights, rest) = bytes.as_chunks::<8>();
    let register = eights.iter().fold(register, eight);
    rest.iter().fold(register, |value, byte| {
        value >> 8 ^ TABLES[0][usize::from(value as u8 ^ byte)]
    })
}

fn eight(register: u32, bytes: &[u8; 8]) -> u32 {
    let word = u64::from_le_bytes(*bytes) ^ u64::from(register);
    let bytes = word.to_le_bytes();
    bytes
        .iter()
        .zip(TABLES.iter().rev())
        .fold(0, |value, (byte, table)| value ^ table[usize::from(*byte)])
}

#[cfg(test)]
mod tests {
    use super::crc32c;

    #[test]
    fn the_published_check_value_is_computed() {
        assert_eq!(!crc32c(!0, b"123456789"), 0xe306_9283);
    }

    #[test]
    fn a_checksum_in_parts_equals_one_pass() {
        let bytes: Vec<u8> = (0..100).collect();
        for cut in 0..100 {
            assert_eq!(
                crc32c(crc32c(7, &bytes[..cut]), &bytes[cut..]),
                crc32c(7, &bytes)
            );
        }
    }
}
