//! CRC-32C as the kernel counts it: the register is given in and out, inverted by nobody.

const POLYNOMIAL: u32 = 0x82f6_3b78;
const TABLE: [u32; 256] = table();

const fn table() -> [u32; 256] {
    let (mut table, mut index) = ([0; 256], 0);
    while index < 256 {
        let (mut value, mut bit) = (index as u32, 0);
        while bit < 8 {
            value = if value & 1 == 1 { value >> 1 ^ POLYNOMIAL } else { value >> 1 };
            bit += 1;
        }
        table[index] = value;
        index += 1;
    }
    table
}

pub(super) fn crc32c(register: u32, bytes: &[u8]) -> u32 {
    bytes.iter().fold(register, |value, byte| value >> 8 ^ TABLE[usize::from(value as u8 ^ byte)])
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_check_value_of_the_catalogue() {
        assert_eq!(!super::crc32c(!0, b"123456789"), 0xe306_9283);
    }
}
