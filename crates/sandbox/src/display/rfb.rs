//! The part of RFB, the protocol of VNC, that a bridge between a viewer and QEMU needs.
//!
//! ```text
//!   viewer <── version, password, its size ── bridge ── version, no password ──> QEMU
//!   viewer ── format, encodings, requests, keys, pointer ──> QEMU
//!   viewer <── pictures ── QEMU
//! ```
//!
//! Always: the bridge knows where each message ends, so it can exchange QEMU between two messages.
//! That is why it lets only encodings pass whose length it can compute and which need nothing of
//! earlier pictures. Both ends are hostile: lengths are bounded, and no message is held whole but
//! short ones.

use std::io;
use std::time::Duration;

use des::Des;
use des::cipher::{Array, BlockCipherEncrypt, KeyInit};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::sleep;

const VERSION: &[u8; 12] = b"RFB 003.008\n";
const VERSION_3: &[u8; 12] = b"RFB 003.003\n";
const VERSION_7: &[u8; 12] = b"RFB 003.007\n";
const NO_PASSWORD: u8 = 1;
const PASSWORD: u8 = 2;

const RAW: i32 = 0;
const DESKTOP_SIZE: i32 = -223;
const QEMU_KEYS: i32 = -258;

const ENCODINGS_MAX: u16 = 256;
/// The text of a clipboard that a viewer sends. It is not passed on.
const TEXT_BYTES_MAX: u32 = 1 << 20;
/// QEMU's name of the machine.
const NAME_BYTES_MAX: u32 = 4096;

pub(super) const FORMAT_BYTES: usize = 16;

/// A viewer with a wrong password waits this long for the answer.
const REFUSAL_PAUSE: Duration = Duration::from_secs(1);

/// A password of a view, of at most eight bytes.
#[derive(Debug, Clone)]
pub struct Password(String);

/// The letters of a password: none looks like another.
const LETTERS: &[u8; 32] = b"abcdefghjkmnpqrstuvwxyz23456789-";

impl Password {
    /// A random one, of 40 bits.
    pub fn random() -> io::Result<Self> {
        let mut bytes = [0; 8];
        getrandom::fill(&mut bytes).map_err(io::Error::other)?;
        let letters = bytes.map(|byte| char::from(LETTERS[usize::from(byte) % LETTERS.len()]));
        Ok(Self(letters.iter().collect()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// What a viewer that knows the password answers to a challenge.
    fn answer(&self, challenge: &[u8; 16]) -> [u8; 16] {
        let mut key = [0; 8];
        for (bits, byte) in key.iter_mut().zip(self.0.bytes()) {
            // VNC counts the bits of a key from the other end.
            *bits = byte.reverse_bits();
        }
        let cipher = Des::new(&key.into());
        let mut answer = [0; 16];
        for (from, to) in challenge.chunks_exact(8).zip(answer.chunks_exact_mut(8)) {
            let mut block = Array::try_from(from).expect("it has eight bytes");
            cipher.encrypt_block(&mut block);
            to.copy_from_slice(&block);
        }
        answer
    }
}

/// What QEMU sends about its screen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Init {
    pub width: u16,
    pub height: u16,
    pub format: [u8; FORMAT_BYTES],
}

fn refused(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Greets a viewer and checks its password, if there is one. It waits for the screen's size then.
pub(super) async fn greet_viewer<S>(stream: &mut S, password: Option<&Password>) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    stream.write_all(VERSION).await?;
    let mut version = [0; 12];
    stream.read_exact(&mut version).await?;
    let check = password.map_or(NO_PASSWORD, |_| PASSWORD);
    if version == *VERSION_3 {
        stream.write_all(&u32::from(check).to_be_bytes()).await?;
    } else if version == *VERSION || version == *VERSION_7 {
        stream.write_all(&[1, check]).await?;
        if stream.read_u8().await? != check {
            return Err(refused("the viewer asks for another kind of check"));
        }
    } else {
        return Err(refused("the viewer speaks another version of RFB"));
    }
    match password {
        Some(password) => check_password(stream, password, version).await?,
        // Only this version gets a result without a check.
        None if version == *VERSION => stream.write_all(&0_u32.to_be_bytes()).await?,
        None => {}
    }
    // Whether it shares the screen: all viewers do.
    stream.read_u8().await.map(drop)
}

async fn check_password<S>(stream: &mut S, password: &Password, version: [u8; 12]) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut challenge = [0; 16];
    getrandom::fill(&mut challenge).map_err(io::Error::other)?;
    stream.write_all(&challenge).await?;
    let mut answer = [0; 16];
    stream.read_exact(&mut answer).await?;
    let wanted = password.answer(&challenge);
    let differs = answer
        .iter()
        .zip(wanted)
        .fold(0, |all, (a, b)| all | (a ^ b));
    if differs == 0 {
        return stream.write_all(&0_u32.to_be_bytes()).await;
    }
    // Guesses take time.
    sleep(REFUSAL_PAUSE).await;
    stream.write_all(&1_u32.to_be_bytes()).await?;
    if version == *VERSION {
        let reason = b"wrong password";
        stream
            .write_all(&(reason.len() as u32).to_be_bytes())
            .await?;
        stream.write_all(reason).await?;
    }
    Err(refused("the viewer has another password"))
}

/// Greets QEMU, which asks for no password.
pub(super) async fn greet_qemu<S>(stream: &mut S) -> io::Result<Init>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut version = [0; 12];
    stream.read_exact(&mut version).await?;
    if version != *VERSION {
        return Err(refused("QEMU speaks another version of RFB"));
    }
    stream.write_all(VERSION).await?;
    let kinds = stream.read_u8().await?;
    let mut offered = vec![0; kinds.into()];
    stream.read_exact(&mut offered).await?;
    if !offered.contains(&NO_PASSWORD) {
        return Err(refused("QEMU asks for a password"));
    }
    stream.write_all(&[NO_PASSWORD]).await?;
    if stream.read_u32().await? != 0 {
        return Err(refused("QEMU refuses the connection"));
    }
    // Shared with other viewers.
    stream.write_all(&[1]).await?;
    let width = stream.read_u16().await?;
    let height = stream.read_u16().await?;
    let mut format = [0; FORMAT_BYTES];
    stream.read_exact(&mut format).await?;
    let name = stream.read_u32().await?;
    if name > NAME_BYTES_MAX {
        return Err(refused("the name of the screen is too long"));
    }
    skip(stream, name.into()).await?;
    Ok(Init {
        width,
        height,
        format,
    })
}

/// The first message to a viewer: the size of the screen, and its name.
pub(super) fn init(init: &Init, name: &str) -> Vec<u8> {
    let mut message = Vec::new();
    message.extend(init.width.to_be_bytes());
    message.extend(init.height.to_be_bytes());
    message.extend(init.format);
    message.extend((name.len() as u32).to_be_bytes());
    message.extend(name.as_bytes());
    message
}

/// A message of a viewer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum FromViewer {
    Format([u8; FORMAT_BYTES]),
    Encodings(Vec<i32>),
    /// A request for a picture, as it is sent.
    Request(Vec<u8>),
    /// A key or the pointer, as it is sent.
    Input(Vec<u8>),
    /// Not passed on.
    Other,
}

impl FromViewer {
    pub async fn read(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Self> {
        let kind = stream.read_u8().await?;
        match kind {
            0 => {
                skip(stream, 3).await?;
                let mut format = [0; FORMAT_BYTES];
                stream.read_exact(&mut format).await?;
                if !matches!(format[0], 8 | 16 | 32) {
                    return Err(refused("the viewer asks for pixels of an unknown length"));
                }
                Ok(Self::Format(format))
            }
            2 => {
                skip(stream, 1).await?;
                let count = stream.read_u16().await?;
                if count > ENCODINGS_MAX {
                    return Err(refused("the viewer lists too many encodings"));
                }
                let mut encodings = Vec::new();
                for _ in 0..count {
                    encodings.push(stream.read_i32().await?);
                }
                Ok(Self::Encodings(encodings))
            }
            3 => Ok(Self::Request(message(stream, kind, 9).await?)),
            4 => Ok(Self::Input(message(stream, kind, 7).await?)),
            5 => Ok(Self::Input(message(stream, kind, 5).await?)),
            6 => {
                skip(stream, 3).await?;
                // A viewer with the extended clipboard sends the length negated.
                let length = stream.read_i32().await?.unsigned_abs();
                if length > TEXT_BYTES_MAX {
                    return Err(refused("the viewer's clipboard is too long"));
                }
                skip(stream, length.into()).await?;
                Ok(Self::Other)
            }
            251 => {
                skip(stream, 5).await?;
                let screens = stream.read_u8().await?;
                skip(stream, 1 + 16 * u64::from(screens)).await?;
                Ok(Self::Other)
            }
            255 => match stream.read_u8().await? {
                0 => {
                    let mut key = vec![kind, 0];
                    key.resize(12, 0);
                    stream.read_exact(&mut key[2..]).await?;
                    Ok(Self::Input(key))
                }
                _ => Err(refused(
                    "the viewer sends a message of QEMU's that is unknown",
                )),
            },
            _ => Err(refused("the viewer sends an unknown message")),
        }
    }
}

async fn message(
    stream: &mut (impl AsyncRead + Unpin),
    kind: u8,
    bytes: usize,
) -> io::Result<Vec<u8>> {
    let mut message = vec![kind; bytes + 1];
    stream.read_exact(&mut message[1..]).await?;
    Ok(message)
}

async fn skip(stream: &mut (impl AsyncRead + Unpin), bytes: u64) -> io::Result<()> {
    let skipped = tokio::io::copy(&mut stream.take(bytes), &mut tokio::io::sink()).await?;
    if skipped == bytes {
        Ok(())
    } else {
        Err(io::ErrorKind::UnexpectedEof.into())
    }
}

/// How a viewer wants its pictures.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Wishes {
    pub format: [u8; FORMAT_BYTES],
    encodings: Vec<i32>,
}

impl Wishes {
    /// Those of a viewer that has sent nothing.
    pub fn of(init: &Init) -> Self {
        Self {
            format: init.format,
            encodings: vec![RAW],
        }
    }

    pub fn set_encodings(&mut self, wanted: &[i32]) {
        let passes = |encoding: &&i32| matches!(**encoding, DESKTOP_SIZE | QEMU_KEYS);
        self.encodings = [RAW]
            .iter()
            .chain(wanted.iter().filter(passes))
            .copied()
            .collect();
    }

    /// Whether the viewer can show a screen that changes its size.
    pub fn resizes(&self) -> bool {
        self.encodings.contains(&DESKTOP_SIZE)
    }

    /// The messages that express them.
    pub fn messages(&self) -> Vec<u8> {
        [self.format_message(), self.encodings_message()].concat()
    }

    fn format_message(&self) -> Vec<u8> {
        [&[0; 4][..], &self.format].concat()
    }

    pub fn encodings_message(&self) -> Vec<u8> {
        let mut message = vec![2, 0];
        message.extend((self.encodings.len() as u16).to_be_bytes());
        for encoding in &self.encodings {
            message.extend(encoding.to_be_bytes());
        }
        message
    }

    /// The bytes of a pixel.
    fn pixel_bytes(&self) -> u64 {
        let has_colour_map = self.format[3] == 0;
        if has_colour_map {
            1
        } else {
            u64::from(self.format[0]).div_ceil(8).clamp(1, 4)
        }
    }
}

/// A request for a whole picture.
pub(super) fn whole(width: u16, height: u16) -> Vec<u8> {
    let mut message = vec![3, 0, 0, 0, 0, 0];
    message.extend(width.to_be_bytes());
    message.extend(height.to_be_bytes());
    message
}

/// A change of the screen's size, as QEMU would send it.
pub(super) fn resized(width: u16, height: u16) -> Vec<u8> {
    let mut message = vec![0, 0, 0, 1, 0, 0, 0, 0];
    message.extend(width.to_be_bytes());
    message.extend(height.to_be_bytes());
    message.extend(DESKTOP_SIZE.to_be_bytes());
    message
}

/// Passes one message of QEMU on. The wishes are read when the message has begun: until then they
/// may change. Returns the size of the screen, if the message changes it. When
/// QEMU ends in the middle of a message, the message is completed first, with black pixels and
/// empty rectangles, so that another QEMU can continue after it. An error of kind
/// [`io::ErrorKind::UnexpectedEof`] is the end of QEMU; others are of the viewer.
pub(super) async fn pass_on(
    qemu: &mut (impl AsyncRead + Unpin),
    viewer: &mut (impl AsyncWrite + Unpin),
    wishes: impl FnOnce() -> Wishes,
) -> io::Result<Option<(u16, u16)>> {
    match of_qemu(qemu.read_u8().await)? {
        0 => update(qemu, viewer, &wishes()).await,
        1 => {
            let mut head = [1; 6];
            of_qemu(qemu.read_exact(&mut head[1..]).await)?;
            let colours = u64::from(u16::from_be_bytes([head[4], head[5]]));
            viewer.write_all(&head).await?;
            copy(qemu, viewer, 6 * colours).await.map(|()| None)
        }
        2 => viewer.write_all(&[2]).await.map(|()| None),
        3 => {
            let mut head = [3; 8];
            of_qemu(qemu.read_exact(&mut head[1..]).await)?;
            let length = u32::from_be_bytes([head[4], head[5], head[6], head[7]]);
            if length > TEXT_BYTES_MAX {
                return Err(gone());
            }
            viewer.write_all(&head).await?;
            copy(qemu, viewer, length.into()).await.map(|()| None)
        }
        _ => Err(gone()),
    }
}

async fn update(
    qemu: &mut (impl AsyncRead + Unpin),
    viewer: &mut (impl AsyncWrite + Unpin),
    wishes: &Wishes,
) -> io::Result<Option<(u16, u16)>> {
    let mut head = [0; 4];
    of_qemu(qemu.read_exact(&mut head[1..]).await)?;
    viewer.write_all(&head).await?;
    let mut rectangles = u16::from_be_bytes([head[2], head[3]]);
    let mut size = None;
    while rectangles > 0 {
        match rectangle(qemu, viewer, wishes).await {
            Ok(changed) => size = changed.or(size),
            Err(error) => {
                if error.kind() == io::ErrorKind::UnexpectedEof {
                    // The rectangle that broke off is whole by now.
                    for _ in 1..rectangles {
                        viewer.write_all(&[0; 12]).await?;
                    }
                }
                return Err(error);
            }
        }
        rectangles -= 1;
    }
    viewer.flush().await?;
    Ok(size)
}

async fn rectangle(
    qemu: &mut (impl AsyncRead + Unpin),
    viewer: &mut (impl AsyncWrite + Unpin),
    wishes: &Wishes,
) -> io::Result<Option<(u16, u16)>> {
    let mut head = [0; 12];
    let read = of_qemu(qemu.read_exact(&mut head).await);
    let encoding = i32::from_be_bytes([head[8], head[9], head[10], head[11]]);
    let is_known = matches!(encoding, RAW | DESKTOP_SIZE | QEMU_KEYS);
    if read.is_err() || !is_known {
        viewer.write_all(&[0; 12]).await?;
        return Err(gone());
    }
    viewer.write_all(&head).await?;
    let width = u16::from_be_bytes([head[4], head[5]]);
    let height = u16::from_be_bytes([head[6], head[7]]);
    match encoding {
        RAW => {
            let pixels = u64::from(width) * u64::from(height);
            copy(qemu, viewer, pixels * wishes.pixel_bytes()).await?;
            Ok(None)
        }
        DESKTOP_SIZE => Ok(Some((width, height))),
        _ => Ok(None),
    }
}

/// Copies so many bytes. Those that QEMU does not send any more are zeros.
async fn copy(
    qemu: &mut (impl AsyncRead + Unpin),
    viewer: &mut (impl AsyncWrite + Unpin),
    bytes: u64,
) -> io::Result<()> {
    let mut buffer = vec![0; 64 << 10];
    let mut left = bytes;
    while left > 0 {
        let most = left.min(buffer.len() as u64) as usize;
        match qemu.read(&mut buffer[..most]).await {
            Ok(count @ 1..) => {
                viewer.write_all(&buffer[..count]).await?;
                left -= count as u64;
            }
            _ => {
                tokio::io::copy(&mut tokio::io::repeat(0).take(left), viewer).await?;
                return Err(gone());
            }
        }
    }
    Ok(())
}

/// QEMU has ended, or what it sends makes no sense.
fn gone() -> io::Error {
    io::ErrorKind::UnexpectedEof.into()
}

/// Whatever error a read of QEMU has, QEMU is gone.
fn of_qemu<T>(read: io::Result<T>) -> io::Result<T> {
    read.map_err(|_| gone())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMAT: [u8; FORMAT_BYTES] = [32, 24, 0, 1, 0, 255, 0, 255, 0, 255, 16, 8, 0, 0, 0, 0];

    fn wishes() -> Wishes {
        Wishes {
            format: FORMAT,
            encodings: vec![RAW, DESKTOP_SIZE],
        }
    }

    fn rect(width: u16, height: u16, encoding: i32) -> Vec<u8> {
        let mut head = vec![0; 4];
        head.extend(width.to_be_bytes());
        head.extend(height.to_be_bytes());
        head.extend(encoding.to_be_bytes());
        head
    }

    async fn passed(sent: &[u8]) -> (io::Result<Option<(u16, u16)>>, Vec<u8>) {
        let mut viewer = Vec::new();
        let mut qemu = sent;
        let result = pass_on(&mut qemu, &mut viewer, wishes).await;
        (result, viewer)
    }

    /// The answer of another implementation to the challenge of sixteen bytes 0 to 15 with the
    /// password `password`.
    #[test]
    fn the_answer_to_a_challenge_is_that_of_vnc() {
        let challenge: [u8; 16] = std::array::from_fn(|index| index as u8);
        let answer = Password("password".into()).answer(&challenge);
        assert_eq!(answer, CHALLENGE_ANSWER);
        assert_ne!(Password("passwore".into()).answer(&challenge), answer);
    }

    const CHALLENGE_ANSWER: [u8; 16] = [
        0xb8, 0x66, 0x92, 0x41, 0x25, 0xc8, 0xee, 0xbb, 0x9d, 0xeb, 0xc1, 0xdb, 0x61, 0xc5, 0x38,
        0xe2,
    ];

    #[tokio::test]
    async fn a_whole_update_passes_unchanged() {
        let mut sent = vec![0, 0, 0, 2];
        sent.extend(rect(2, 1, RAW));
        sent.extend([1; 8]);
        sent.extend(rect(640, 480, DESKTOP_SIZE));
        let (result, viewer) = passed(&sent).await;
        assert_eq!(result.unwrap(), Some((640, 480)));
        assert_eq!(viewer, sent);
    }

    /// Wherever QEMU ends, the viewer gets a whole message or none.
    #[tokio::test]
    async fn an_update_that_breaks_off_is_completed() {
        let mut sent = vec![0, 0, 0, 3];
        sent.extend(rect(2, 1, RAW));
        sent.extend([1; 8]);
        sent.extend(rect(3, 2, RAW));
        sent.extend([2; 24]);
        sent.extend(rect(1, 1, RAW));
        sent.extend([3; 4]);
        for length in 0..sent.len() {
            let (result, viewer) = passed(&sent[..length]).await;
            assert_eq!(result.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
            if length < 4 {
                assert!(viewer.is_empty(), "{length}");
                continue;
            }
            let (again, copied) = passed(&viewer).await;
            assert!(again.is_ok(), "cut at {length}");
            assert_eq!(copied, viewer, "cut at {length}");
        }
    }

    #[tokio::test]
    async fn what_has_no_known_length_ends_the_connection() {
        let mut sent = vec![0, 0, 0, 1];
        sent.extend(rect(2, 1, 5));
        for sent in [&sent[..], &[99], &[3, 0, 0, 0, 255, 255, 255, 255]] {
            let (result, _) = passed(sent).await;
            assert_eq!(result.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        }
    }

    #[tokio::test]
    async fn messages_of_a_viewer_are_distinguished() {
        let mut sent = Vec::new();
        sent.extend([&[0; 4][..], &FORMAT].concat());
        sent.extend([2, 0, 0, 2, 0, 0, 0, 7, 255, 255, 255, 33]);
        sent.extend(whole(4, 5));
        sent.extend([4, 1, 0, 0, 0, 0, 0, 97]);
        sent.extend([5, 1, 0, 10, 0, 20]);
        sent.extend([6, 0, 0, 0, 0, 0, 0, 3, 1, 2, 3]);
        sent.extend([255, 0, 0, 1, 0, 0, 0, 97, 0, 0, 0, 30]);
        let mut viewer = &sent[..];
        let mut next = async || FromViewer::read(&mut viewer).await.unwrap();
        assert_eq!(next().await, FromViewer::Format(FORMAT));
        assert_eq!(next().await, FromViewer::Encodings(vec![7, DESKTOP_SIZE]));
        assert_eq!(next().await, FromViewer::Request(whole(4, 5)));
        assert!(matches!(next().await, FromViewer::Input(key) if key.len() == 8));
        assert!(matches!(next().await, FromViewer::Input(pointer) if pointer.len() == 6));
        assert_eq!(next().await, FromViewer::Other);
        assert!(matches!(next().await, FromViewer::Input(key) if key.len() == 12));
        assert!(viewer.is_empty());
    }

    #[tokio::test]
    async fn messages_that_are_too_long_or_unknown_are_refused() {
        let refusals: [&[u8]; 5] = [
            &[0; 20],
            &[2, 0, 255, 255],
            &[6, 0, 0, 0, 127, 255, 255, 255],
            &[77],
            &[255, 9],
        ];
        for mut sent in refusals {
            let error = FromViewer::read(&mut sent).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        }
    }

    #[test]
    fn a_pixel_has_the_length_of_its_format() {
        let bytes = |bits: u8, true_colour: u8| {
            let mut wishes = wishes();
            wishes.format[0] = bits;
            wishes.format[3] = true_colour;
            wishes.pixel_bytes()
        };
        assert_eq!(
            [bytes(8, 1), bytes(16, 1), bytes(32, 1), bytes(32, 0)],
            [1, 2, 4, 1]
        );
    }

    #[test]
    fn only_encodings_of_known_length_pass() {
        let mut wishes = wishes();
        wishes.set_encodings(&[16, 7, 6, 5, 1, 0, -223, -239, -258, -307]);
        assert_eq!(wishes.encodings, [RAW, DESKTOP_SIZE, QEMU_KEYS]);
        assert!(wishes.resizes());
    }
}
