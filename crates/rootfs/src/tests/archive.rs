//! Archives for tests, valid and invalid.

/// A header without its checksum.
pub fn raw_header(name: &str, kind: u8, bytes: u64) -> [u8; 512] {
    let mut header = [0; 512];
    put(&mut header, 0, name.as_bytes());
    put(&mut header, 100, b"0000644\0");
    put(&mut header, 108, b"0000000\0");
    put(&mut header, 116, b"0000000\0");
    put(&mut header, 124, format!("{bytes:011o}\0").as_bytes());
    put(&mut header, 136, b"00000000012\0");
    header[156] = kind;
    put(&mut header, 257, b"ustar\x0000");
    header
}

pub fn put(header: &mut [u8], at: usize, bytes: &[u8]) {
    header[at..at + bytes.len()].copy_from_slice(bytes);
}

pub fn seal(mut header: [u8; 512]) -> Vec<u8> {
    put(&mut header, 148, b"        ");
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    put(&mut header, 148, format!("{sum:06o}\0 ").as_bytes());
    header.to_vec()
}

/// Members, one after the other.
#[derive(Default, Clone)]
pub struct Archive(pub Vec<u8>);

impl Archive {
    pub fn member(mut self, name: &str, kind: u8, bytes: &[u8]) -> Self {
        self.0
            .extend(seal(raw_header(name, kind, bytes.len() as u64)));
        self.bytes(bytes)
    }

    pub fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    pub fn file(self, name: &str, text: &str) -> Self {
        self.member(name, b'0', text.as_bytes())
    }

    pub fn dir(self, name: &str) -> Self {
        self.member(name, b'5', b"")
    }

    pub fn link(mut self, name: &str, kind: u8, target: &str) -> Self {
        let mut header = raw_header(name, kind, 0);
        put(&mut header, 157, target.as_bytes());
        self.0.extend(seal(header));
        self
    }

    pub fn symlink(self, name: &str, target: &str) -> Self {
        self.link(name, b'2', target)
    }

    pub fn hard_link(self, name: &str, target: &str) -> Self {
        self.link(name, b'1', target)
    }

    pub fn pax(self, records: &[(&str, &str)]) -> Self {
        let text: String = records
            .iter()
            .map(|(key, value)| record(key, value))
            .collect();
        self.member("pax", b'x', text.as_bytes())
    }

    pub fn end(mut self) -> Vec<u8> {
        self.0.resize(self.0.len() + 1024, 0);
        self.0
    }
}

fn record(key: &str, value: &str) -> String {
    let rest = key.len() + value.len() + 3;
    let length = (rest + 1..).find(|length| length.to_string().len() + rest == *length);
    format!("{} {key}={value}\n", length.expect("there is one"))
}
