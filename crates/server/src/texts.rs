//! Small files of a guest that almost every request needs, read again only when they have changed.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use sandtree::{Files, Result, Stat};

use crate::locked::lock;

/// The files of one guest; clones share them.
#[derive(Debug, Clone, Default)]
pub struct Texts(Arc<Mutex<HashMap<&'static str, Text>>>);

#[derive(Debug, Clone)]
struct Text {
    stat: Stat,
    content: Arc<str>,
}

impl Texts {
    /// The text of a file when it was last read. It may have changed.
    pub fn last(&self, path: &str) -> Option<Arc<str>> {
        let text = lock(&self.0).get(path)?.content.clone();
        Some(text)
    }

    /// The text of a file of at most `most` bytes. One that has the same times and size as before
    /// is not read again.
    pub async fn read(&self, files: &Files, path: &'static str, most: usize) -> Result<Arc<str>> {
        let stat = files.stat(path).await?;
        let known = lock(&self.0).get(path).cloned();
        if let Some(text) = known.filter(|text| text.stat == stat) {
            return Ok(text.content);
        }
        let bytes = files.read_to_vec(path, most).await?;
        let content: Arc<str> = String::from_utf8_lossy(&bytes).into();
        let text = Text {
            stat,
            content: content.clone(),
        };
        lock(&self.0).insert(path, text);
        Ok(content)
    }
}
