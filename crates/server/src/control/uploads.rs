//! Files of templates, as their clients send them: to addresses that the server has signed.
//!
//! ```text
//!   PUT /templates/NAME/files/HASH?expires=…&signature=…      tar, or tar packed by gzip
//!        └── unpacked and counted while it arrives ──► an archive of the store, for a day
//! ```
//!
//! Always: no key is needed here; the signature is for one archive, and for an hour. The
//! archive is hostile: its size is bounded as it is sent and as it unpacks, and the server reads
//! nothing else of it. It is unpacked in the guest, below one directory.

use async_compression::tokio::bufread::GzipDecoder;
use axum::body::Body;
use axum::extract::State;
use futures_util::TryStreamExt;
use hyper::{HeaderMap, StatusCode};
use sandtree::{NewArchive, is_equal};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncRead, AsyncReadExt};
use tokio_util::io::StreamReader;

use super::Asked;
use super::builds::Two;
use crate::auth;
use crate::clock::now_unix_ms;
use crate::digits;
use crate::error::{Fault, Result};
use crate::gateway::Gateway;
use crate::naming::TemplateName;

/// What the token of an address is for.
const UPLOAD: &str = "upload";
const VALID_MS: u64 = 3600 * 1000;
const SENT_MAX: u64 = 4 << 30;
const UNPACKED_MAX: u64 = 16 << 30;
/// What any archive may unpack to, and what each of its bytes may.
const UNPACKED_FREE: u64 = 64 << 20;
const RATIO_MAX: u64 = 100;
const CHUNK: usize = 128 << 10;
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// The key of an archive in the store.
pub(super) fn key(template: &str, hash: &str) -> Result<String> {
    let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    if hash.len() != 64 || !hash.bytes().all(is_digit) {
        let message = format!("invalid hash {hash:?}: use 64 hexadecimal digits");
        return Err(Fault::bad_request(message));
    }
    let digest = Sha256::digest(format!("{template}\0{hash}").as_bytes());
    Ok(digits::hex(&digest[..16]))
}

/// The address to which a client sends an archive.
pub(super) fn address(
    gateway: &Gateway,
    headers: &HeaderMap,
    template: &str,
    hash: &str,
) -> Result<String> {
    let expires = now_unix_ms() + VALID_MS;
    let signature = signature(gateway, template, hash, expires)?;
    let host = auth::header(headers, "host").unwrap_or("localhost");
    let is_secure = gateway.config().tls.is_some()
        || auth::header(headers, "x-forwarded-proto") == Some("https");
    let scheme = if is_secure { "https" } else { "http" };
    Ok(format!(
        "{scheme}://{host}/templates/{template}/files/{hash}?expires={expires}&signature={signature}"
    ))
}

fn signature(gateway: &Gateway, template: &str, hash: &str, expires: u64) -> Result<String> {
    let access = gateway.host().access()?;
    let what = format!("{template}\0{hash}\0{expires}");
    Ok(access.token(UPLOAD, &what))
}

#[derive(Debug, Deserialize)]
pub(super) struct Signed {
    expires: Option<u64>,
    signature: Option<String>,
}

pub(super) async fn receive(
    State(gateway): State<Gateway>,
    Two(template, hash): Two,
    Asked(signed): Asked<Signed>,
    body: Body,
) -> Result<StatusCode> {
    let name = TemplateName::parse(&template)?.name;
    let key = key(&name, &hash)?;
    let (Some(expires), Some(presented)) = (signed.expires, signed.signature) else {
        return Err(Fault::unauthorized("the address is not signed"));
    };
    let expected = signature(&gateway, &name, &hash, expires)?;
    if !is_equal(expected.as_bytes(), presented.as_bytes()) {
        return Err(Fault::unauthorized("invalid signature"));
    }
    if expires < now_unix_ms() {
        return Err(Fault::unauthorized(
            "the address is no longer valid: ask for a new one",
        ));
    }
    let mut archive = gateway.host().new_archive()?;
    let stream = body.into_data_stream().map_err(std::io::Error::other);
    unpack(StreamReader::new(stream), &mut archive).await?;
    gateway.host().keep_archive(archive, &key)?;
    Ok(StatusCode::OK)
}

/// Receives an archive, and unpacks it if it is packed.
async fn unpack(sent: impl AsyncBufRead + Unpin + Send, archive: &mut NewArchive) -> Result<()> {
    let mut sent = tokio::io::BufReader::new(Counted {
        inner: sent,
        bytes: 0,
    });
    let start = sent.fill_buf().await.map_err(refused)?;
    if start.starts_with(&GZIP) {
        let mut unpacked = GzipDecoder::new(sent);
        unpacked.multiple_members(true);
        return write(&mut unpacked, archive, |unpacked| {
            unpacked.get_ref().get_ref().bytes
        })
        .await;
    }
    write(&mut sent, archive, |sent| sent.get_ref().bytes).await
}

/// Writes what `from` gives, as long as it is in proportion to what was sent.
async fn write<R: AsyncRead + Unpin>(
    from: &mut R,
    archive: &mut NewArchive,
    sent: impl Fn(&R) -> u64,
) -> Result<()> {
    let mut chunk = vec![0; CHUNK];
    let mut total = 0;
    loop {
        let count = from.read(&mut chunk).await.map_err(refused)?;
        if count == 0 {
            return Ok(());
        }
        total += count as u64;
        let allowed = sent(from).saturating_mul(RATIO_MAX) + UNPACKED_FREE;
        if sent(from) > SENT_MAX || total > allowed.min(UNPACKED_MAX) {
            let message = "the archive is too large: at most 4 GiB as it is sent, 16 GiB \
                           unpacked, and not more than 100 times its size and 64 MiB";
            return Err(Fault::new(StatusCode::PAYLOAD_TOO_LARGE, message));
        }
        archive.write(&chunk[..count])?;
    }
}

fn refused(error: std::io::Error) -> Fault {
    Fault::bad_request(format!("the archive cannot be read: {error}"))
}

/// Counts what a client sends.
struct Counted<R> {
    inner: R,
    bytes: u64,
}

impl<R: AsyncRead + Unpin> AsyncRead for Counted<R> {
    fn poll_read(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
        buffer: &mut tokio::io::ReadBuf<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        let before = buffer.filled().len();
        let polled = std::pin::Pin::new(&mut self.inner).poll_read(context, buffer);
        self.bytes += (buffer.filled().len() - before) as u64;
        polled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_is_that_of_its_template() {
        let hash = "0a".repeat(32);
        let one = key("a", &hash).unwrap();
        assert_eq!(one.len(), 32);
        assert_ne!(one, key("b", &hash).unwrap());
        for wrong in ["", "../x", &"0A".repeat(32), &"0a".repeat(33)] {
            assert!(key("a", wrong).is_err(), "{wrong}");
        }
    }
}
