//! The file of the index: an SQLite database of rows, each with a checksum.
//!
//! ```text
//! snapshots: digest | inode and bytes of the manifest it was made from | summary (postcard) | SHA-256 of all of these
//! ```
//!
//! Always: any number of processes may use it. Where one row does not fit its checksum, none is
//! believed. Nothing is synced: after a power cut the file may be anything, and then it is damaged.
//! A process that was killed leaves a journal that the next one undoes.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use rusqlite::types::ValueRef;
use rusqlite::{Connection, ErrorCode, OpenFlags, TransactionBehavior, params};
use sha2::{Digest as _, Sha256};
use thiserror::Error as ThisError;

use super::SnapshotSummary;
use crate::Digest;

/// How rows are written. Another number comes from another version, and its rows are rebuilt.
const VERSION: i64 = 2;

/// Others hold it for moments. Reading all manifests takes longer than this, but never has to wait.
const PATIENCE: Duration = Duration::from_millis(500);

/// No row takes less: its digest and its checksum alone are more.
const ROW_BYTES_MIN: u64 = 64;

/// Why the index is of no use.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
pub(super) enum Trouble {
    /// What is in the file is of no use to anybody.
    #[error("the index is damaged: {0}")]
    Damaged(String),
    /// The file may be good.
    #[error("the index cannot be used: {0}")]
    Unusable(String),
}

impl From<rusqlite::Error> for Trouble {
    fn from(error: rusqlite::Error) -> Self {
        use ErrorCode as Code;
        match error.sqlite_error_code() {
            Some(
                Code::DatabaseBusy
                | Code::DatabaseLocked
                | Code::ReadOnly
                | Code::DiskFull
                | Code::CannotOpen
                | Code::PermissionDenied
                | Code::SystemIoFailure
                | Code::OutOfMemory
                | Code::NoLargeFileSupport,
            ) => Self::Unusable(error.to_string()),
            _ => Self::Damaged(error.to_string()),
        }
    }
}

/// Which file a row was made from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Origin {
    pub inode: u64,
    pub bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Row {
    pub origin: Origin,
    pub summary: SnapshotSummary,
}

/// What the database holds.
#[derive(Debug, Default)]
pub(super) struct Rows {
    pub known: BTreeMap<Digest, Row>,
    /// Those that have rows and were not asked for.
    pub others: Vec<Digest>,
}

#[derive(Debug)]
pub(super) struct Database {
    connection: Connection,
    bytes: u64,
}

impl Database {
    /// The existing database; an empty file is a new one.
    pub fn open(path: &Path) -> Result<Option<Self>, Trouble> {
        let bytes = match path.symlink_metadata() {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            found => found.map_err(unusable)?.len(),
        };
        let database = Self::connect(path, bytes)?;
        match database.version()? {
            VERSION => Ok(Some(database)),
            0 if bytes == 0 => Ok(None),
            other => Err(Trouble::Damaged(format!(
                "its version is {other}, not {VERSION}"
            ))),
        }
    }

    /// The database, made if missing.
    pub fn create(path: &Path) -> Result<Self, Trouble> {
        // SQLite would let everybody read it.
        let mut options = OpenOptions::new();
        options
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)
            .map_err(unusable)?;
        let mut database = Self::connect(path, 0)?;
        let transaction = database
            .connection
            .transaction_with_behavior(TransactionBehavior::Immediate)?;
        if transaction.pragma_query_value(None, "user_version", |row| row.get::<_, i64>(0))? == 0 {
            transaction.execute_batch(
                "CREATE TABLE snapshots (digest BLOB PRIMARY KEY, inode INTEGER NOT NULL, bytes INTEGER NOT NULL, \
                 summary BLOB NOT NULL, checksum BLOB NOT NULL) WITHOUT ROWID",
            )?;
            transaction.pragma_update(None, "user_version", VERSION)?;
        }
        transaction.commit()?;
        Ok(database)
    }

    fn connect(path: &Path, bytes: u64) -> Result<Self, Trouble> {
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
            | OpenFlags::SQLITE_OPEN_NO_MUTEX
            | OpenFlags::SQLITE_OPEN_NOFOLLOW;
        let connection = Connection::open_with_flags(path, flags)?;
        connection.busy_timeout(PATIENCE)?;
        connection.execute_batch(
            "PRAGMA trusted_schema = OFF; PRAGMA cell_size_check = ON; PRAGMA synchronous = OFF; PRAGMA mmap_size = 0",
        )?;
        Ok(Self { connection, bytes })
    }

    fn version(&self) -> Result<i64, Trouble> {
        Ok(self
            .connection
            .pragma_query_value(None, "user_version", |row| row.get(0))?)
    }

    /// The rows of these snapshots, which are sorted, and which others there are.
    pub fn rows(&self, wanted: &[Digest]) -> Result<Rows, Trouble> {
        let select = "SELECT digest, inode, bytes, summary, checksum FROM snapshots";
        let mut statement = self.connection.prepare(select)?;
        let mut found = Rows::default();
        let mut rows = statement.query([])?;
        let mut count = 0;
        while let Some(row) = rows.next()? {
            count += 1;
            // A tree whose branches lead to one another has no end.
            if count > self.bytes / ROW_BYTES_MIN {
                return Err(Trouble::Damaged(
                    "it has more rows than it has room for".into(),
                ));
            }
            let row = read(row)?
                .ok_or_else(|| Trouble::Damaged("a row is not what was written".into()))?;
            let digest = row.summary.digest.clone();
            if wanted.binary_search(&digest).is_ok() {
                found.known.insert(digest, row);
            } else {
                found.others.push(digest);
            }
        }
        Ok(found)
    }

    /// Adds rows, and takes others away.
    pub fn put(&mut self, rows: &[Row], gone: &[Digest]) -> Result<(), Trouble> {
        let transaction = self
            .connection
            .transaction_with_behavior(TransactionBehavior::Immediate)?;
        {
            let mut remove = transaction.prepare("DELETE FROM snapshots WHERE digest = ?1")?;
            for digest in gone {
                remove.execute([digest.as_str().as_bytes()])?;
            }
            let mut insert = transaction
                .prepare("INSERT OR REPLACE INTO snapshots VALUES (?1, ?2, ?3, ?4, ?5)")?;
            for row in rows {
                let key = row.summary.digest.as_str().as_bytes();
                let summary = postcard::to_allocvec(&row.summary).map_err(unusable)?;
                let inode = row.origin.inode.cast_signed();
                let bytes = row.origin.bytes.cast_signed();
                insert.execute(params![
                    key,
                    inode,
                    bytes,
                    summary,
                    checksum(key, row.origin, &summary)
                ])?;
            }
        }
        Ok(transaction.commit()?)
    }
}

fn unusable(error: impl ToString) -> Trouble {
    Trouble::Unusable(error.to_string())
}

/// A row, if it is what was written.
fn read(row: &rusqlite::Row<'_>) -> Result<Option<Row>, Trouble> {
    let values = (
        row.get_ref(0)?,
        row.get_ref(1)?,
        row.get_ref(2)?,
        row.get_ref(3)?,
        row.get_ref(4)?,
    );
    let (
        ValueRef::Blob(key),
        ValueRef::Integer(inode),
        ValueRef::Integer(bytes),
        ValueRef::Blob(summary),
        ValueRef::Blob(sum),
    ) = values
    else {
        return Ok(None);
    };
    let origin = Origin {
        inode: inode.cast_unsigned(),
        bytes: bytes.cast_unsigned(),
    };
    if checksum(key, origin, summary) != sum {
        return Ok(None);
    }
    let summary = postcard::from_bytes::<SnapshotSummary>(summary).ok();
    let summary = summary.filter(|summary| summary.digest.as_str().as_bytes() == key);
    Ok(summary.map(|summary| Row { origin, summary }))
}

fn checksum(key: &[u8], origin: Origin, summary: &[u8]) -> [u8; 32] {
    let hasher = Sha256::new()
        .chain_update(VERSION.to_le_bytes())
        .chain_update((key.len() as u64).to_le_bytes());
    let hasher = hasher
        .chain_update(key)
        .chain_update(origin.inode.to_le_bytes());
    hasher
        .chain_update(origin.bytes.to_le_bytes())
        .chain_update(summary)
        .finalize()
        .into()
}
