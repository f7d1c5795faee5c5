//! The modules of a crate import each other in one direction.
//!
//! ```text
//!   lib.rs, main.rs ──► driver ──► capture ──► error      no way leads back
//! ```
//!
//! A node is a module directly below the crate's root, with everything below it. An edge is a path
//! that begins with `crate::` or leaves the module by `super::`, in a `use` or in code. A name that
//! the root re-exports leads to the module that defines it. The root may import every module; no
//! module may import what the root itself defines. Tests may import everything.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::code::{self, Code};
use crate::sources;

/// Crates whose modules still form a cycle, and the number of modules in their largest one. The
/// number may shrink and must not grow. A crate without a cycle has no row.
#[cfg(test)]
const UNTANGLED_LATER: &[(&str, usize)] = &[];

/// A crate's files, with tests marked.
pub struct Crate {
    pub name: String,
    pub files: Vec<File>,
}

pub struct File {
    pub code: Code,
    /// The module that the file is: empty for the root. None for build scripts and tests, and for a
    /// file that no `mod` declares.
    pub module: Option<Vec<String>>,
}

/// Which modules import which, and one place for each edge.
#[derive(Default)]
pub struct Graph {
    edges: BTreeMap<String, BTreeMap<String, String>>,
}

/// The name of the root in complaints.
const ROOT: &str = "the crate's root";

/// Every crate below `crates`.
pub fn crates() -> Vec<Crate> {
    let names = sources::directories("crates");
    names.into_iter().map(Crate::read).collect()
}

impl Crate {
    fn read(name: String) -> Self {
        let dir = format!("crates/{name}");
        let files = sources::rust(&[&dir]).into_iter().map(Code::new);
        Self::new(name, files.collect())
    }

    /// For the self-tests of rules: paths and texts.
    #[cfg(test)]
    pub fn sample(name: &str, files: &[(&str, &str)]) -> Self {
        let code = |(path, text): &(&str, &str)| {
            Code::new(sources::Source {
                path: (*path).to_owned(),
                text: (*text).to_owned(),
            })
        };
        Self::new(name.to_owned(), files.iter().map(code).collect())
    }

    fn new(name: String, codes: Vec<Code>) -> Self {
        let files = codes.into_iter().map(|code| File { code, module: None });
        let mut read = Self {
            name,
            files: files.collect(),
        };
        for root in ["src/lib.rs", "src/main.rs"] {
            let path = format!("crates/{}/{root}", read.name);
            read.enter(&path, Vec::new());
        }
        read
    }

    /// Gives the file its module, and so every file that it declares.
    fn enter(&mut self, path: &str, module: Vec<String>) {
        let Some(file) = self.files.iter_mut().find(|file| file.code.path() == path) else {
            return;
        };
        file.module = Some(module.clone());
        let is_test = file.code.is_test;
        for declared in declared(&file.code) {
            let below = [module.clone(), vec![declared.name]].concat();
            for path in declared.paths {
                self.mark(&path, is_test || declared.is_test);
                self.enter(&path, below.clone());
            }
        }
    }

    fn mark(&mut self, path: &str, is_test: bool) {
        let found = self.files.iter_mut().find(|file| file.code.path() == path);
        if let Some(file) = found {
            file.code.is_test |= is_test;
        }
    }

    pub fn graph(&self) -> Graph {
        let tops = self.top_modules();
        let exported = self.exported();
        let mut graph = Graph::default();
        for file in &self.files {
            let Some(module) = &file.module else { continue };
            let Some(from) = module.first() else { continue };
            for (offset, path) in imports(&file.code, module) {
                let name = path.first().map_or("", String::as_str);
                let target = match exported.get(name) {
                    _ if tops.contains(name) => name,
                    Some(module) => module.as_str(),
                    None => ROOT,
                };
                graph.add(from, target, file.code.at(offset));
            }
        }
        graph
    }

    fn top_modules(&self) -> BTreeSet<&str> {
        let modules = self.files.iter().filter_map(|file| file.module.as_ref());
        modules
            .filter_map(|module| module.first().map(String::as_str))
            .collect()
    }

    /// What the root re-exports, and the module each name comes from.
    fn exported(&self) -> BTreeMap<String, String> {
        let mut exported = BTreeMap::new();
        let tops = self.top_modules();
        let is_root = |file: &&File| file.module.as_ref().is_some_and(Vec::is_empty);
        for root in self.files.iter().filter(is_root) {
            for path in uses(&root.code) {
                let path: Vec<String> = path.into_iter().filter(|name| name != "crate").collect();
                let [module, .., leaf] = &path[..] else {
                    continue;
                };
                if tops.contains(module.as_str()) {
                    exported.insert(leaf.clone(), module.clone());
                }
            }
        }
        exported
    }
}

/// A `mod name;`.
struct Declared {
    name: String,
    is_test: bool,
    /// Where its file can be.
    paths: Vec<String>,
}

fn declared(file: &Code) -> Vec<Declared> {
    let below = directory_below(file.path());
    let found = file.words("mod").filter_map(|at| {
        let name = code::name_at(&file.bare, at + "mod ".len())?;
        let end = at + "mod ".len() + name.len();
        file.bare[end..].starts_with(';').then_some(())?;
        let paths = match path_attribute(file, at) {
            Some(path) => vec![path],
            None => vec![
                format!("{below}/{name}.rs"),
                format!("{below}/{name}/mod.rs"),
            ],
        };
        Some(Declared {
            name: name.to_owned(),
            is_test: file.in_test(at),
            paths,
        })
    });
    found.collect()
}

/// Where the modules that a file declares are.
fn directory_below(path: &str) -> String {
    let (dir, file) = path.rsplit_once('/').unwrap_or(("", path));
    match file {
        "lib.rs" | "main.rs" | "mod.rs" => dir.to_owned(),
        _ => path.trim_end_matches(".rs").to_owned(),
    }
}

/// The file that `#[path = "…"]` on the line before names.
fn path_attribute(file: &Code, at: usize) -> Option<String> {
    let before = file.lines_before(at).next()?;
    let path = file.source.text[before]
        .trim()
        .strip_prefix("#[path = \"")?;
    let (dir, _) = file.path().rsplit_once('/')?;
    Some(format!("{dir}/{}", path.strip_suffix("\"]")?))
}

/// Every path that leads out of the module, outside of tests: from the root on.
fn imports(file: &Code, module: &[String]) -> Vec<(usize, Vec<String>)> {
    let inner = inline_modules(file);
    let mut found = Vec::new();
    for start in ["crate", "super"] {
        for at in file.words(start) {
            let is_path = file.bare[at + start.len()..].starts_with("::");
            let goes_on = file.bare[..at].ends_with("::");
            if !is_path || goes_on || file.in_test(at) {
                continue;
            }
            let within = inner.iter().filter(|(range, _)| range.contains(&at));
            let names = within.map(|(_, name)| name.clone());
            let here: Vec<String> = module.iter().cloned().chain(names).collect();
            let paths = tree(&file.bare, at).into_iter();
            found.extend(paths.map(|path| (at, resolve(&here, &path))));
        }
    }
    found
}

fn resolve(module: &[String], path: &[String]) -> Vec<String> {
    let ups = path.iter().take_while(|name| *name == "super").count();
    let skipped = ups + usize::from(path[0] == "crate");
    let base = match ups {
        0 => &[],
        _ => &module[..module.len().saturating_sub(ups)],
    };
    [base, &path[skipped..]].concat()
}

/// `mod name { … }` and where it is.
fn inline_modules(file: &Code) -> Vec<(Range<usize>, String)> {
    let found = file.words("mod").filter_map(|at| {
        let name = code::name_at(&file.bare, at + "mod ".len())?;
        let open = at + "mod ".len() + name.len() + 1;
        let is_inline = file.bare[open..].starts_with('{');
        is_inline.then(|| (open..code::close_of(&file.bare, open), name.to_owned()))
    });
    found.collect()
}

/// The paths of every `use` of a file.
fn uses(file: &Code) -> Vec<Vec<String>> {
    let begins = file.words("use").map(|at| at + "use ".len());
    begins.flat_map(|at| tree(&file.bare, at)).collect()
}

/// The paths of the tree `a::{b, c::d}` that begins here. A renamed leaf has its new name.
fn tree(bare: &str, from: usize) -> Vec<Vec<String>> {
    let mut at = from;
    let mut prefix = Vec::new();
    loop {
        let Some(name) = code::name_at(bare, at) else {
            return branches(bare, at, &prefix);
        };
        at += name.len();
        prefix.push(name.to_owned());
        if !bare[at..].starts_with("::") {
            break;
        }
        at += "::".len();
    }
    if let Some(renamed) = bare[at..].strip_prefix(" as ")
        && let Some(name) = code::name_at(renamed, 0)
    {
        prefix.push(name.to_owned());
    }
    vec![prefix]
}

/// The branches in braces; a glob or a macro's `$name` is the prefix alone.
fn branches(bare: &str, open: usize, prefix: &[String]) -> Vec<Vec<String>> {
    if !bare[open..].starts_with('{') {
        return vec![prefix.to_vec()];
    }
    let close = code::close_of(bare, open);
    let mut found = Vec::new();
    let mut at = open + 1;
    while at < close - 1 {
        let is_begin = bare[at..].starts_with(code::is_name);
        if is_begin {
            let below = tree(bare, at).into_iter();
            found.extend(below.map(|path| [prefix, &path].concat()));
        }
        at = next_branch(bare, at, close);
    }
    found
}

/// The offset after the next comma that is not in braces of its own.
fn next_branch(bare: &str, from: usize, close: usize) -> usize {
    let mut at = from;
    while at < close - 1 {
        match bare.as_bytes()[at] {
            b'{' => at = code::close_of(bare, at),
            b',' => {
                let rest = &bare[at + 1..];
                return at + 1 + rest.len() - rest.trim_start().len();
            }
            _ if at == from && bare[at..].starts_with(char::is_whitespace) => {
                let rest = &bare[at..];
                return at + rest.len() - rest.trim_start().len();
            }
            _ => at += 1,
        }
    }
    close
}

impl Graph {
    fn add(&mut self, from: &str, to: &str, at: String) {
        if from == to {
            return;
        }
        let edges = self.edges.entry(from.to_owned()).or_default();
        edges.entry(to.to_owned()).or_insert(at);
    }

    fn targets(&self, node: &str) -> impl Iterator<Item = &str> {
        let edges = self.edges.get(node).into_iter().flatten();
        edges.map(|(target, _)| target.as_str())
    }

    fn reachable(&self, from: &str) -> BTreeSet<&str> {
        let mut found = BTreeSet::new();
        let mut waiting: Vec<&str> = self.targets(from).collect();
        while let Some(node) = waiting.pop() {
            if found.insert(node) {
                waiting.extend(self.targets(node));
            }
        }
        found
    }

    /// The largest set of modules that all lead to each other; empty if there is no cycle.
    pub fn largest_cycle(&self) -> BTreeSet<&str> {
        let reachable: BTreeMap<&str, BTreeSet<&str>> = self
            .edges
            .keys()
            .map(|node| (node.as_str(), self.reachable(node)))
            .collect();
        let leads = |from: &str, to: &str| reachable.get(from).is_some_and(|set| set.contains(to));
        let together = reachable.keys().map(|&node| {
            let others = reachable.keys().copied();
            others
                .filter(|other| leads(node, other) && leads(other, node))
                .collect()
        });
        together.max_by_key(BTreeSet::len).unwrap_or_default()
    }

    /// A shortest way from a module back to itself, with the place of each step.
    fn shortest_cycle(&self) -> Vec<String> {
        let cycles = self.largest_cycle();
        let ways = cycles.iter().filter_map(|node| self.way_back(node));
        ways.min_by_key(Vec::len).unwrap_or_default()
    }

    fn way_back(&self, start: &str) -> Option<Vec<String>> {
        let mut ways = vec![vec![start]];
        let mut seen = BTreeSet::new();
        while !ways.is_empty() {
            let mut longer = Vec::new();
            for way in &ways {
                for target in self.targets(way[way.len() - 1]) {
                    let next = [way.clone(), vec![target]].concat();
                    if target == start {
                        return Some(self.places(&next));
                    }
                    if seen.insert(target) {
                        longer.push(next);
                    }
                }
            }
            ways = longer;
        }
        None
    }

    fn places(&self, way: &[&str]) -> Vec<String> {
        let steps = way.windows(2);
        steps
            .map(|step| {
                format!(
                    "{} → {} ({})",
                    step[0], step[1], self.edges[step[0]][step[1]]
                )
            })
            .collect()
    }

    /// The modules that import what the root defines.
    #[cfg(test)]
    fn importers_of_root(&self) -> Vec<String> {
        let found = self.edges.iter().filter_map(|(from, targets)| {
            let at = targets.get(ROOT)?;
            Some(format!("{at}: {from} imports from {ROOT}"))
        });
        found.collect()
    }
}

/// What is wrong with the modules of a crate.
#[cfg(test)]
fn complaints(read: &Crate, bound: Option<usize>) -> Vec<String> {
    let name = &read.name;
    let graph = read.graph();
    let size = graph.largest_cycle().len();
    let mut found = Vec::new();
    match bound {
        None if size > 0 => {
            let cycle = graph.shortest_cycle().join(", ");
            found.push(format!("{name}: {size} modules import each other: {cycle}"));
        }
        Some(_) if size == 0 => {
            found.push(format!(
                "{name}: no cycle is left: remove its row from UNTANGLED_LATER"
            ));
        }
        Some(bound) if size > bound => {
            let cycle = graph.largest_cycle();
            found.push(format!(
                "{name}: the largest cycle grew from {bound} to {size}: {cycle:?}"
            ));
        }
        _ => {}
    }
    if bound.is_none() {
        found.extend(graph.importers_of_root());
    }
    found
}

#[test]
fn modules_import_in_one_direction() {
    let crates = crates();
    let bound = |name: &str| {
        let row = UNTANGLED_LATER.iter().find(|(listed, _)| *listed == name);
        row.map(|(_, bound)| *bound)
    };
    let mut found: Vec<String> = crates
        .iter()
        .flat_map(|read| complaints(read, bound(&read.name)))
        .collect();
    let names: Vec<&str> = crates.iter().map(|read| read.name.as_str()).collect();
    let gone = UNTANGLED_LATER
        .iter()
        .filter(|(name, _)| !names.contains(name));
    found.extend(gone.map(|(name, _)| format!("{name} is no crate")));
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
    assert!(crates.len() >= 10, "{names:?}");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(files: &[(&str, &str)]) -> Crate {
        let code = |(path, text): &(&str, &str)| {
            Code::new(sources::Source {
                path: format!("crates/sample/src/{path}"),
                text: (*text).to_owned(),
            })
        };
        Crate::new("sample".to_owned(), files.iter().map(code).collect())
    }

    fn edges(read: &Crate) -> Vec<String> {
        let graph = read.graph();
        let pairs = graph
            .edges
            .iter()
            .flat_map(|(from, targets)| targets.keys().map(move |to| format!("{from} {to}")));
        pairs.collect()
    }

    #[test]
    fn every_way_to_import_is_an_edge() {
        let read = sample(&[
            (
                "lib.rs",
                "mod a;\nmod b;\nmod c;\nmod d;\nmod e;\npub use c::Thing;\npub struct Own;\n",
            ),
            (
                "a.rs",
                "mod x;\nuse crate::{b::{self, B}, d as other};\nuse std::{fs, io};\n",
            ),
            (
                "a/x.rs",
                "use super::Inside;\nfn f() { super::super::e::g() }\nmod y { use super::super::H; }\n",
            ),
            ("b.rs", "use crate::Thing;\n"),
            (
                "c.rs",
                "fn f() { let _x: crate::d::D = \"crate::a\"; } // crate::a\n",
            ),
            ("d/mod.rs", "pub use crate::Own;\n"),
            (
                "e.rs",
                "#[cfg(test)]\nmod tests { use crate::a; }\n#[cfg(test)]\nmod more;\n",
            ),
            ("e/more.rs", "use crate::a;\n"),
        ]);
        let root = format!("d {ROOT}");
        let expected = ["a b", "a d", "a e", "b c", "c d", &root];
        assert_eq!(edges(&read), expected);
        assert_eq!(complaints(&read, None).len(), 1);
    }

    #[test]
    fn a_cycle_is_found_and_shown() {
        let read = sample(&[
            ("main.rs", "mod a;\nmod b;\nmod c;\nmod d;\n"),
            ("a.rs", "use crate::b;\n"),
            ("b.rs", "\nuse crate::c::X;\n"),
            ("c.rs", "use crate::{\n    a::Y,\n    d,\n};\n"),
            ("d.rs", ""),
        ]);
        let found = complaints(&read, None);
        assert_eq!(
            found,
            [
                "sample: 3 modules import each other: a → b (crates/sample/src/a.rs:1), \
              b → c (crates/sample/src/b.rs:2), c → a (crates/sample/src/c.rs:1)"
            ]
        );
        assert_eq!(complaints(&read, Some(3)), [""; 0]);
        assert_eq!(complaints(&read, Some(2)).len(), 1);
    }

    #[test]
    fn a_row_of_a_crate_without_cycles_is_stale() {
        let read = sample(&[
            ("lib.rs", "mod a;\nmod b;\n"),
            ("a.rs", "use crate::b;\n"),
            ("b.rs", ""),
        ]);
        assert_eq!(complaints(&read, None), [""; 0]);
        assert_eq!(complaints(&read, Some(3)).len(), 1);
    }
}
