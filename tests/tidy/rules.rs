//! The rules of CONTRIBUTING.md that a text search can check.
//!
//! Every violation is counted by rule and crate. `tests/tidy/counts` holds the counts of the crates
//! that still break a rule; every other count is zero. The counts must be equal: a new violation
//! fails, and so does a row that is too high, so that the table shrinks with the code. The failure
//! prints the rows as they should be.

use std::collections::BTreeMap;

use crate::code::{self, Code};
use crate::modules;
use crate::sources;

/// A rule finds the offsets that break it.
pub struct Rule {
    pub name: &'static str,
    find: fn(&Code) -> Vec<usize>,
    applies: Applies,
}

#[derive(Clone, Copy, PartialEq)]
enum Applies {
    Everywhere,
    /// Tests may do it.
    OutsideTests,
}

pub const RULES: [Rule; 16] = [
    rule("avoided-word", avoided_words, Applies::Everywhere),
    rule("drop-without-comment", drops, Applies::OutsideTests),
    rule("expect-without-words", expects, Applies::OutsideTests),
    rule("five-arguments", five_arguments, Applies::OutsideTests),
    rule("bool-argument", bool_arguments, Applies::OutsideTests),
    rule("function-over-70", long_functions, Applies::OutsideTests),
    rule("line-over-100", long_lines, Applies::Everywhere),
    rule("lint-without-reason", lints, Applies::Everywhere),
    rule("match-on-bool", bool_matches, Applies::Everywhere),
    rule("match-on-unit", unit_matches, Applies::Everywhere),
    rule("named-to-ignore", ignored_by_name, Applies::OutsideTests),
    rule("no-module-doc", no_module_doc, Applies::OutsideTests),
    rule("todo", todos, Applies::Everywhere),
    rule("tuple-let", tuple_lets, Applies::Everywhere),
    rule("unsafe-without-safety", unsafes, Applies::Everywhere),
    rule("unwrap", unwraps, Applies::OutsideTests),
];

const fn rule(name: &'static str, find: fn(&Code) -> Vec<usize>, applies: Applies) -> Rule {
    Rule {
        name,
        find,
        applies,
    }
}

/// The longest line, in characters. rustfmt breaks code there, but neither comments nor strings.
const COLUMNS: usize = 100;
/// The longest function, in lines.
const LINES: usize = 70;
/// From this many arguments on, a function takes a struct.
const ARGUMENTS: usize = 5;

impl Rule {
    pub fn violations(&self, code: &Code) -> Vec<usize> {
        let mut found = (self.find)(code);
        if self.applies == Applies::OutsideTests {
            found.retain(|&at| !code.in_test(at));
        }
        found
    }
}

/// Words that style.md replaces by plainer ones.
const AVOIDED: [&str; 9] = [
    "told",
    "nobody",
    "whoever",
    "goes on",
    "go on",
    "what is there",
    "born",
    "newborn",
    "grown",
];

/// In comments, strings and names of functions.
fn avoided_words(code: &Code) -> Vec<usize> {
    // This file lists the words.
    if code.path().ends_with("tidy/rules.rs") {
        return Vec::new();
    }
    let text = code.source.text.to_lowercase();
    // Lower case changes the length of some characters; then offsets cannot be used.
    if text.len() != code.source.text.len() {
        return Vec::new();
    }
    let prose = code.comments.iter().chain(&code.strings);
    let in_prose = prose.flat_map(|range| {
        let text = &text[range.clone()];
        let found = AVOIDED.iter().flat_map(|word| whole_words(text, word));
        let found = found.filter(|&at| !is_account(text, at));
        found.map(|at| range.start + at).collect::<Vec<_>>()
    });
    let functions = code.words("fn").filter(|&at| {
        let name = code::name_at(&text, at + "fn ".len()).unwrap_or_default();
        let name = name.replace('_', " ");
        AVOIDED
            .iter()
            .any(|word| whole_words(&name, word).next().is_some())
    });
    in_prose.chain(functions).collect()
}

/// `nobody:x:65534:65534:nobody:` is an account of Unix.
fn is_account(text: &str, at: usize) -> bool {
    text[at..].starts_with("nobody:")
}

fn whole_words<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let found = text.match_indices(word).map(|(at, _)| at);
    found.filter(move |&at| {
        let before = text[..at].chars().next_back();
        let after = text[at + word.len()..].chars().next();
        !before.is_some_and(code::is_name) && !after.is_some_and(code::is_name)
    })
}

/// `drop(call(…))` drops a result: a comment before it, or before the first of several, says why.
fn drops(code: &Code) -> Vec<usize> {
    let is_dropped_call = |at: &usize| {
        let is_method = code.bare[..*at].ends_with('.') || code.bare[..*at].ends_with("fn ");
        let open = at + "drop".len();
        let is_call = code.bare[open..].starts_with('(');
        !is_method && is_call && code.bare[open + 1..code::close_of(&code.bare, open)].contains('(')
    };
    let calls = code.words("drop").filter(is_dropped_call);
    calls.filter(|&at| !is_explained(code, at)).collect()
}

/// Whether a comment stands on the line or on the one before, over other dropped calls.
fn is_explained(code: &Code, at: usize) -> bool {
    if code.line(at).contains("//") {
        return true;
    }
    let mut above = code
        .lines_before(at)
        .map(|range| code.source.text[range].trim())
        .skip_while(|line| line.starts_with("drop("));
    above.next().is_some_and(|line| line.contains("//"))
}

/// The text of an `expect` says in at least two words why it holds.
fn expects(code: &Code) -> Vec<usize> {
    let calls = code.places(".expect(\"");
    calls
        .filter(|at| {
            let from = at + ".expect(\"".len();
            let text = &code.source.text[from..];
            let end = text.find('"').unwrap_or(text.len());
            text[..end].split_whitespace().count() < 2
        })
        .collect()
}

fn five_arguments(code: &Code) -> Vec<usize> {
    let functions = code.words("fn").filter(|&at| {
        let arguments = arguments(code, at);
        let own = arguments.iter().filter(|argument| !is_self(argument));
        own.count() >= ARGUMENTS && !code.bare[..at].ends_with("extern \" \" ")
    });
    functions.collect()
}

fn bool_arguments(code: &Code) -> Vec<usize> {
    let functions = code.words("fn").filter(|&at| {
        let arguments = arguments(code, at);
        // The argument of `require` is its condition.
        let is_require = code.bare[at..].starts_with("fn require(");
        let is_bool = |argument: &String| argument.ends_with(": bool");
        !is_require && arguments.iter().any(is_bool)
    });
    functions.collect()
}

fn is_self(argument: &str) -> bool {
    let words = argument.split([' ', '&', ':']);
    words.take(4).any(|word| word == "self")
}

/// The arguments of the function at `fn`, each as it is written.
fn arguments(code: &Code, at: usize) -> Vec<String> {
    let begin = at + "fn ".len();
    let Some(name) = code::name_at(&code.bare, begin) else {
        return Vec::new();
    };
    let open = open_of_arguments(&code.bare, begin + name.len());
    let close = code::close_of(&code.bare, open);
    let inside = code.bare.get(open + 1..close - 1).unwrap_or_default();
    let arguments = split_commas(inside).into_iter();
    arguments
        .map(|argument| argument.trim().to_owned())
        .filter(|argument| !argument.is_empty())
        .collect()
}

/// The offset of the `(` after a function's generics.
fn open_of_arguments(bare: &str, from: usize) -> usize {
    let mut depth = 0;
    let mut before = ' ';
    for (length, c) in bare[from..].char_indices() {
        match c {
            '<' => depth += 1,
            '>' if before != '-' => depth -= 1,
            '(' if depth == 0 => return from + length,
            _ => {}
        }
        before = c;
    }
    bare.len()
}

/// The parts between commas that are in no brackets.
fn split_commas(text: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut depth = 0;
    let mut start = 0;
    let mut before = ' ';
    for (at, c) in text.char_indices() {
        match c {
            '(' | '[' | '{' | '<' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            '>' if before != '-' && before != '=' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
        before = c;
    }
    parts.push(&text[start..]);
    parts
}

fn long_functions(code: &Code) -> Vec<usize> {
    let functions = code.functions().into_iter();
    functions
        .filter(|function| function.lines > LINES)
        .map(|function| function.range.start)
        .collect()
}

/// Lines of more than 100 columns, but for strings, addresses, tables, and what is drawn in a code
/// fence.
fn long_lines(code: &Code) -> Vec<usize> {
    let mut found = Vec::new();
    let mut offset = 0;
    let mut in_fence = false;
    for line in code.source.text.split('\n') {
        let is_fence = is_fence(line);
        in_fence ^= is_fence;
        if line.chars().count() > COLUMNS && !in_fence && !may_be_long(code, offset, line) {
            found.push(offset);
        }
        offset += line.len() + 1;
    }
    found
}

fn is_fence(line: &str) -> bool {
    let line = line.trim_start();
    let comment = line.strip_prefix("//!").or(line.strip_prefix("///"));
    comment.is_some_and(|text| text.trim_start().starts_with("```"))
}

fn may_be_long(code: &Code, offset: usize, line: &str) -> bool {
    let range = offset..offset + line.len();
    let is_in_line = |string: &&std::ops::Range<usize>| {
        string.start < range.end && range.start < string.end && !string.is_empty()
    };
    let is_table = line.starts_with("//! |") || line.trim_start().starts_with("/// |");
    is_table || line.contains("://") || code.strings.iter().any(|string| is_in_line(&string))
}

/// `allow` and `expect` of a lint say why.
fn lints(code: &Code) -> Vec<usize> {
    let attributes = ["#[allow(", "#![allow(", "#[expect(", "#![expect("];
    let places = attributes.iter().flat_map(|start| {
        let places = code.places(start);
        places.map(|at| (at, at + start.len() - 1))
    });
    let without = places.filter(|&(_, open)| {
        let close = code::close_of(&code.bare, open);
        !code.bare[open..close].contains("reason =")
    });
    without.map(|(at, _)| at).collect()
}

/// A `match` with the arms `true` and `false` is an `if`.
fn bool_matches(code: &Code) -> Vec<usize> {
    let mut blocks = BTreeMap::new();
    for word in ["true", "false"] {
        for at in code.words(word) {
            let after = code.bare[at + word.len()..].trim_start();
            let before = code.bare[..at].trim_end().chars().next_back();
            let is_arm = after.starts_with("=>") || after.starts_with("if ");
            if is_arm && matches!(before, Some('{' | '}' | ',')) {
                blocks.entry(block_around(&code.bare, at)).or_insert(at);
            }
        }
    }
    blocks.into_values().collect()
}

/// The offset of the `{` that is open here.
fn block_around(bare: &str, at: usize) -> usize {
    let mut depth = 0;
    for (offset, c) in bare[..at].char_indices().rev() {
        match c {
            '}' => depth += 1,
            '{' if depth == 0 => return offset,
            '{' => depth -= 1,
            _ => {}
        }
    }
    0
}

/// `match () { () if … }` is a chain of `if`.
fn unit_matches(code: &Code) -> Vec<usize> {
    code.places("match () {").collect()
}

/// `let _sent = ….is_ok();` drops a result under a name.
fn ignored_by_name(code: &Code) -> Vec<usize> {
    let endings = [
        ".is_err();",
        ".is_ok();",
        ".ok();",
        ".is_some();",
        ".is_none();",
    ];
    let lets = code.places("let _").filter(|&at| {
        let is_named = code::name_at(&code.bare, at + "let ".len()).is_some_and(|name| name != "_");
        let statement = code.statement(at);
        is_named && endings.iter().any(|ending| statement.ends_with(ending))
    });
    lets.collect()
}

/// A file begins with what its module is for.
fn no_module_doc(code: &Code) -> Vec<usize> {
    let text = &code.source.text;
    let is_documented = text.starts_with("//!") || text.starts_with("#!");
    if is_documented { Vec::new() } else { vec![0] }
}

fn todos(code: &Code) -> Vec<usize> {
    let words = [
        concat!("TO", "DO"),
        concat!("FIX", "ME"),
        concat!("XX", "X"),
    ];
    let comments = code.comments.iter();
    comments
        .filter(|range| {
            let text = &code.source.text[(*range).clone()];
            words
                .iter()
                .any(|word| whole_words(text, word).next().is_some())
        })
        .map(|range| range.start)
        .collect()
}

/// `let (a, b) = (x, y);` is two steps in one line.
fn tuple_lets(code: &Code) -> Vec<usize> {
    let lets = code.places("let (").filter(|&at| {
        let before = code.bare[..at].trim_end();
        let is_condition = ["if", "while", "&&"]
            .iter()
            .any(|word| before.ends_with(word));
        !is_condition && joins_steps(code, at + "let ".len())
    });
    lets.collect()
}

/// Whether the pattern at `open` gets a tuple that is written out.
fn joins_steps(code: &Code, open: usize) -> bool {
    let close = code::close_of(&code.bare, open);
    let rest = code.bare[close..].trim_start();
    let Some(value) = rest.strip_prefix('=').map(str::trim_start) else {
        return false;
    };
    if !value.starts_with('(') {
        return false;
    }
    let end = code::close_of(value, 0);
    let is_whole = value[end..].trim_start().starts_with(';');
    is_whole && split_commas(&value[1..end - 1]).len() > 1
}

/// A block or `impl` that is unsafe has a SAFETY comment above it or in its line.
fn unsafes(code: &Code) -> Vec<usize> {
    let places = code.words("unsafe").filter(|&at| {
        let rest = code.bare[at + "unsafe".len()..].trim_start();
        rest.starts_with('{') || rest.starts_with("impl")
    });
    places.filter(|&at| !is_safe(code, at)).collect()
}

fn is_safe(code: &Code, at: usize) -> bool {
    if code.line(at).contains("SAFETY") {
        return true;
    }
    // The statement may begin some lines before its `unsafe`.
    let above = code.lines_before(at).take(8);
    let mut lines = above.map(|range| code.source.text[range].trim());
    lines.any(|line| line.starts_with("//") && line.contains("SAFETY"))
}

fn unwraps(code: &Code) -> Vec<usize> {
    code.places(".unwrap()").collect()
}

/// The counts, by rule and crate.
type Counts = BTreeMap<(String, String), usize>;

/// Everything that is checked, with the name that the table has for it.
fn checked() -> Vec<(String, Vec<Code>)> {
    let crates = modules::crates().into_iter().map(|read| {
        let files = read.files.into_iter().map(|file| file.code);
        (read.name, files.collect())
    });
    let others = ["fuzz", "tests/tidy", "tests/vm"].into_iter().map(|dir| {
        let files = sources::rust(&[dir]).into_iter().map(Code::new);
        (dir.to_owned(), files.collect())
    });
    crates.chain(others).collect()
}

fn listed() -> Counts {
    let source = sources::file("tests/tidy/counts");
    let rows = source.text.lines().filter(|line| !line.starts_with('#'));
    let row = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [rule, place, count] = words[..] else {
            panic!("{}: not `rule crate count`: {line}", source.path)
        };
        let count = count.parse().expect("a count is a number");
        ((rule.to_owned(), place.to_owned()), count)
    };
    rows.filter(|line| !line.is_empty()).map(row).collect()
}

/// The violations of each rule in each crate.
fn found() -> BTreeMap<(String, String), Vec<String>> {
    let mut found: BTreeMap<_, Vec<String>> = BTreeMap::new();
    for (place, files) in checked() {
        for rule in &RULES {
            for file in &files {
                let violations = rule.violations(file);
                let key = (rule.name.to_owned(), place.clone());
                let places = violations.iter().map(|&at| file.at(at));
                found.entry(key).or_default().extend(places);
            }
        }
    }
    found
}

/// The rows of the table as they should be.
#[cfg(not(test))]
pub fn rows() -> String {
    let found = found().into_iter().filter(|(_, places)| !places.is_empty());
    let rows = found.map(|((rule, place), places)| row(&rule, &place, places.len()) + "\n");
    rows.collect()
}

/// Every place that breaks a rule.
#[cfg(not(test))]
pub fn places() -> String {
    let found = found().into_iter().flat_map(|((rule, _), places)| {
        let lines = places.into_iter();
        lines.map(move |at| format!("{at}: {rule}\n"))
    });
    found.collect()
}

fn row(rule: &str, place: &str, count: usize) -> String {
    format!("{rule:<22} {place:<10} {count}")
}

#[test]
fn rules_are_kept_as_well_as_the_table_says() {
    let found = found();
    let listed = listed();
    let mut complaints = Vec::new();
    for (key, places) in &found {
        let expected = listed.get(key).copied().unwrap_or(0);
        if places.len() == expected {
            continue;
        }
        let (rule, place) = key;
        let row = row(rule, place, places.len());
        complaints.push(format!("{row}   (tests/tidy/counts says {expected})"));
        if places.len() > expected {
            complaints.extend(places.iter().take(40).map(|at| format!("    {at}")));
        }
    }
    let unknown = listed.keys().filter(|key| !found.contains_key(key));
    complaints
        .extend(unknown.map(|(rule, place)| format!("no such rule or crate: {rule} {place}")));
    let zero = listed.iter().filter(|(_, count)| **count == 0);
    complaints.extend(zero.map(|((rule, place), _)| format!("zero needs no row: {rule} {place}")));
    assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For each rule, what breaks it as often as the number says.
    const SAMPLES: &[(&str, usize, &str)] = &[
        (
            "avoided-word",
            2,
            "// It is told.\nfn goes_on() {}\nfn retold() { cold() }",
        ),
        ("avoided-word", 1, "const A: &str = \"Nobody waits\";"),
        (
            "avoided-word",
            0,
            "const A: &str = \"nobody:x:65534:65534:nobody:/\";",
        ),
        (
            "drop-without-comment",
            1,
            "fn f() { drop(fs::remove_file(a)); }",
        ),
        (
            "drop-without-comment",
            0,
            "// It may be gone.\ndrop(f(a));\ndrop(f(b));\ndrop(guard);",
        ),
        (
            "drop-without-comment",
            0,
            "impl Drop for A { fn drop(&mut self) { self.b.drop(c()) } }",
        ),
        (
            "expect-without-words",
            2,
            "a.expect(\"\"); b.expect(\"ok\"); c.expect(\"two words\");",
        ),
        (
            "five-arguments",
            1,
            "fn f<A: Fn(u8, u8)>(&self, a: A, b: (u8, u8), c: u8, d: u8, e: u8) {}",
        ),
        (
            "five-arguments",
            0,
            "fn f(&mut self, a: HashMap<u8, u8>, b: fn(u8, u8) -> u8, c: u8, d: u8) {}",
        ),
        ("bool-argument", 0, "fn require(fine: bool) {}"),
        (
            "bool-argument",
            1,
            "fn f(a: bool) {}\nfn g(a: Vec<bool>) -> bool { true }",
        ),
        (
            "lint-without-reason",
            1,
            "#[allow(dead_code)]\n#[expect(unused, reason = \"a\")]\nfn f() {}",
        ),
        ("match-on-bool", 1, "match a { true => 1, false => 2 }"),
        (
            "match-on-bool",
            0,
            "match (a, b) { (true, _) => 1, (false, true) => 2 }",
        ),
        ("match-on-unit", 1, "match () { () if a => 1, () => 2 }"),
        (
            "named-to-ignore",
            1,
            "fn f() { let _sent = a.send(1).is_ok(); let _guard = lock(); }",
        ),
        ("no-module-doc", 1, "use a;"),
        ("no-module-doc", 0, "//! Words.\nuse a;"),
        ("todo", 1, concat!("// TO", "DO: later\nlet a = TO_DO;")),
        (
            "tuple-let",
            2,
            "let (a, b) = (c, d);\nlet (mut a, _) =\n    (f(x, y), [g, h]);",
        ),
        (
            "tuple-let",
            0,
            "let (a, b) = f(c, d); let (a, b) = (c).d(); if let (A(a), B(b)) = (c, d) {}",
        ),
        ("unsafe-without-safety", 1, "fn f() { unsafe { g() } }"),
        (
            "unsafe-without-safety",
            0,
            "// SAFETY: it is.\nunsafe impl Send for A {}\n#[unsafe(no_mangle)]\nfn f() {}",
        ),
        (
            "unwrap",
            1,
            "fn f() { a.unwrap(); }\n#[test]\nfn t() { b.unwrap(); }",
        ),
    ];

    fn count(name: &str, text: &str) -> usize {
        let rule = RULES.iter().find(|rule| rule.name == name);
        let rule = rule.expect("the rule exists");
        rule.violations(&Code::sample(text)).len()
    }

    #[test]
    fn each_rule_finds_what_breaks_it() {
        for (name, expected, text) in SAMPLES {
            assert_eq!(count(name, text), *expected, "{name}: {text}");
        }
    }

    #[test]
    fn a_long_line_is_found_unless_it_cannot_be_broken() {
        let long = "a ".repeat(60);
        let samples = [
            (1, format!("// {long}\n")),
            (1, format!("let x = {long};\n")),
            (0, format!("// {}\n", "ä".repeat(90))),
            (0, format!("let x = \"{long}\";\n")),
            (0, format!("// https://{long}\n")),
            (0, format!("//! | {long} |\n")),
            (0, format!("//! ```text\n//! {long}\n//! ```\n")),
            (1, format!("//! ```text\n//! ```\n//! {long}\n")),
        ];
        for (expected, text) in samples {
            assert_eq!(count("line-over-100", &text), expected, "{text}");
        }
    }

    #[test]
    fn a_long_function_is_found() {
        let function = |lines: usize| format!("fn f() {{\n{}}}\n", "    a();\n".repeat(lines - 2));
        assert_eq!(count("function-over-70", &function(70)), 0);
        assert_eq!(count("function-over-70", &function(71)), 1);
    }

    #[test]
    fn every_rule_has_a_sample_that_breaks_it() {
        let own_tests = ["line-over-100", "function-over-70"];
        for rule in &RULES {
            let is_sample = |sample: &&(&str, usize, &str)| sample.0 == rule.name && sample.1 > 0;
            let is_tested = SAMPLES.iter().any(|sample| is_sample(&sample));
            assert!(is_tested || own_tests.contains(&rule.name), "{}", rule.name);
        }
    }
}
