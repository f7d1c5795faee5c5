//! The files of the repository that rules look at.

use std::fs;
use std::path::{Path, PathBuf};

/// A file of the repository.
pub struct Source {
    /// From the top of the repository.
    pub path: String,
    pub text: String,
}

impl Source {
    fn read(path: &Path) -> Source {
        let text = fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let path = path.strip_prefix(top()).expect("it is in the repository");
        Source {
            path: path.to_str().expect("its name is text").to_owned(),
            text,
        }
    }

    /// `path:line` of a place in the text.
    pub fn at(&self, offset: usize) -> String {
        format!(
            "{}:{}",
            self.path,
            1 + self.text[..offset].matches('\n').count()
        )
    }
}

pub fn top() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .canonicalize()
        .expect("the repository is there")
}

/// A file by its path from the top.
pub fn file(path: &str) -> Source {
    Source::read(&top().join(path))
}

/// Every Rust file below these directories.
pub fn rust(dirs: &[&str]) -> Vec<Source> {
    with_extension(dirs, "rs")
}

/// Every Python file below these directories.
pub fn python(dirs: &[&str]) -> Vec<Source> {
    with_extension(dirs, "py")
}

fn with_extension(dirs: &[&str], wanted: &str) -> Vec<Source> {
    let mut found = Vec::new();
    dirs.iter()
        .for_each(|dir| collect(&top().join(dir), &mut found));
    let is_wanted = |path: &PathBuf| {
        path.extension()
            .is_some_and(|extension| extension == wanted)
    };
    found
        .iter()
        .filter(|path| is_wanted(path))
        .map(|path| Source::read(path))
        .collect()
}

/// Every shell script directly in these directories, by its first line.
pub fn scripts(dirs: &[&str]) -> Vec<Source> {
    let mut found = Vec::new();
    dirs.iter()
        .for_each(|dir| collect(&top().join(dir), &mut found));
    let is_shell = |source: &Source| {
        source.text.starts_with("#!") && source.text.lines().next().unwrap().contains("sh")
    };
    found
        .iter()
        .map(|path| Source::read(path))
        .filter(is_shell)
        .collect()
}

/// The names of the directories directly in this one.
pub fn directories(dir: &str) -> Vec<String> {
    let dir = top().join(dir);
    let entries = fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    let paths = entries.map(|entry| entry.expect("it can be listed").path());
    let mut names: Vec<String> = paths
        .filter(|path| path.is_dir())
        .filter_map(|path| Some(path.file_name()?.to_str()?.to_owned()))
        .collect();
    names.sort();
    names
}

fn collect(dir: &Path, found: &mut Vec<PathBuf>) {
    let entries = fs::read_dir(dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    let mut paths: Vec<PathBuf> = entries
        .map(|entry| entry.expect("it can be listed").path())
        .collect();
    paths.sort();
    for path in paths {
        if path.is_dir() {
            collect(&path, found);
        } else {
            found.push(path);
        }
    }
}
