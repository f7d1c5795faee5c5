//! Rust files as the rules read them: comments and strings apart from code, tests apart from the
//! rest.
//!
//! This is a text search, not a compiler. It knows comments, strings, characters, attributes and
//! matching brackets; that is enough for formatted code. It does not expand macros.

use std::ops::Range;

use crate::sources::Source;

/// A Rust file and where its parts are. All ranges are byte offsets into the text.
pub struct Code {
    pub source: Source,
    /// The text with spaces instead of comments and of the contents of strings and characters.
    /// Offsets and line breaks are those of the text.
    pub bare: String,
    /// Comments, each one line or one block.
    pub comments: Vec<Range<usize>>,
    /// The contents of string literals, without their quotes.
    pub strings: Vec<Range<usize>>,
    /// Items behind `#[cfg(test)]` or `#[test]`.
    test_items: Vec<Range<usize>>,
    /// The whole file belongs to tests.
    pub is_test: bool,
}

/// A function with a body.
pub struct Function {
    pub name: String,
    /// From `fn` to the closing brace.
    pub range: Range<usize>,
    pub lines: usize,
}

impl Code {
    pub fn new(source: Source) -> Self {
        let Parts {
            bare,
            comments,
            strings,
        } = Lexer::new(&source.text).run();
        let is_test = bare.contains("#![cfg(test)]") || is_test_path(&source.path);
        let test_items = test_items(&bare);
        Self {
            source,
            bare,
            comments,
            strings,
            test_items,
            is_test,
        }
    }

    /// For the self-tests of rules.
    #[cfg(test)]
    pub fn sample(text: &str) -> Self {
        Self::new(Source {
            path: "crates/sample/src/lib.rs".to_owned(),
            text: text.to_owned(),
        })
    }

    pub fn path(&self) -> &str {
        &self.source.path
    }

    pub fn at(&self, offset: usize) -> String {
        self.source.at(offset)
    }

    pub fn in_test(&self, offset: usize) -> bool {
        self.is_test || self.test_items.iter().any(|item| item.contains(&offset))
    }

    /// Every place of `word` in the code that is a whole word there.
    pub fn words<'a>(&'a self, word: &'a str) -> impl Iterator<Item = usize> + 'a {
        self.places(word).filter(move |&at| {
            let before = self.bare[..at].chars().next_back();
            let after = self.bare[at + word.len()..].chars().next();
            !before.is_some_and(is_name) && !after.is_some_and(is_name)
        })
    }

    /// Every place of `text` in the code.
    pub fn places<'a>(&'a self, text: &'a str) -> impl Iterator<Item = usize> + 'a {
        self.bare.match_indices(text).map(|(at, _)| at)
    }

    /// The line that holds this offset, as it is in the file.
    pub fn line(&self, offset: usize) -> &str {
        &self.source.text[self.line_range(offset)]
    }

    /// The same line without comments and the contents of strings.
    pub fn bare_line(&self, offset: usize) -> &str {
        &self.bare[self.line_range(offset)]
    }

    pub fn line_range(&self, offset: usize) -> Range<usize> {
        let start = self.bare[..offset].rfind('\n').map_or(0, |at| at + 1);
        let end = self.bare[offset..].find('\n');
        start..end.map_or(self.bare.len(), |length| offset + length)
    }

    /// The lines before the one that holds this offset, nearest first.
    pub fn lines_before(&self, offset: usize) -> impl Iterator<Item = Range<usize>> + '_ {
        let mut start = self.line_range(offset).start;
        std::iter::from_fn(move || {
            let end = start.checked_sub(1)?;
            start = self.line_range(end).start;
            Some(start..end)
        })
    }

    /// The statement or item that begins here, up to its `;` or the end of its braces.
    pub fn statement(&self, from: usize) -> &str {
        &self.bare[from..end_of_item(&self.bare, from, Commas::Inside)]
    }

    pub fn functions(&self) -> Vec<Function> {
        let begins = self.words("fn").filter_map(|at| self.function(at));
        begins.collect()
    }

    fn function(&self, at: usize) -> Option<Function> {
        let name: String = name_at(&self.bare, at + "fn ".len())?.to_owned();
        let end = end_of_item(&self.bare, at, Commas::Inside);
        let text = &self.bare[at..end];
        let lines = 1 + text.matches('\n').count();
        text.ends_with('}').then_some(Function {
            name,
            range: at..end,
            lines,
        })
    }
}

fn is_test_path(path: &str) -> bool {
    let dirs: Vec<&str> = path.split('/').collect();
    matches!(
        dirs[..],
        ["crates", _, "tests" | "benches" | "examples", ..] | ["tests", ..]
    )
}

pub fn is_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The name that begins at this offset.
pub fn name_at(text: &str, at: usize) -> Option<&str> {
    let rest = text.get(at..)?;
    let end = rest.find(|c| !is_name(c)).unwrap_or(rest.len());
    (end > 0).then(|| &rest[..end])
}

/// The offset after the bracket that closes the one at `open`.
pub fn close_of(bare: &str, open: usize) -> usize {
    let mut depth = 0;
    for (length, c) in bare[open..].char_indices() {
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return open + length + 1;
        }
    }
    bare.len()
}

/// What a comma outside of brackets means.
#[derive(Clone, Copy, PartialEq)]
enum Commas {
    /// It belongs to the item, as in `<A, B>`.
    Inside,
    /// It ends the item: a field, a variant or an arm.
    End,
}

/// The offset after the `;` or the braces that end the item at `from`. A `}` that closes what is
/// around the item ends it, too.
fn end_of_item(bare: &str, from: usize, commas: Commas) -> usize {
    let mut at = from;
    while let Some(c) = bare[at..].chars().next() {
        match c {
            '(' | '[' => at = close_of(bare, at),
            '{' => return close_of(bare, at),
            ';' => return at + 1,
            '}' | ')' => return at,
            ',' if commas == Commas::End => return at + 1,
            _ => at += c.len_utf8(),
        }
    }
    bare.len()
}

const TEST_ATTRIBUTES: [&str; 5] = [
    "#[cfg(test)]",
    "#[cfg(all(test",
    "#[cfg(any(test",
    "#[test]",
    "#[tokio::test",
];

const ITEM_WORDS: [&str; 16] = [
    "pub",
    "fn",
    "mod",
    "use",
    "impl",
    "struct",
    "enum",
    "const",
    "static",
    "type",
    "async",
    "unsafe",
    "trait",
    "extern",
    "let",
    "macro_rules",
];

fn test_items(bare: &str) -> Vec<Range<usize>> {
    let mut items: Vec<Range<usize>> = Vec::new();
    for attribute in TEST_ATTRIBUTES {
        for (at, _) in bare.match_indices(attribute) {
            items.push(at..end_of_attributed(bare, at));
        }
    }
    items
}

/// The end of the item whose first attribute is here.
pub fn end_of_attributed(bare: &str, attribute: usize) -> usize {
    let item = after_attributes(bare, attribute);
    let is_item = name_at(bare, item).is_some_and(|word| ITEM_WORDS.contains(&word));
    let commas = if is_item { Commas::Inside } else { Commas::End };
    end_of_item(bare, item, commas)
}

/// The offset of what the attributes from here on belong to.
fn after_attributes(bare: &str, from: usize) -> usize {
    let mut at = from;
    loop {
        at += bare[at..].len() - bare[at..].trim_start().len();
        if !bare[at..].starts_with("#[") {
            return at;
        }
        at = close_of(bare, at + 1);
    }
}

/// What the lexer makes of a file.
struct Parts {
    bare: String,
    comments: Vec<Range<usize>>,
    strings: Vec<Range<usize>>,
}

struct Lexer<'a> {
    text: &'a str,
    at: usize,
    parts: Parts,
}

impl<'a> Lexer<'a> {
    fn new(text: &'a str) -> Self {
        let parts = Parts {
            bare: String::with_capacity(text.len()),
            comments: Vec::new(),
            strings: Vec::new(),
        };
        Self { text, at: 0, parts }
    }

    fn run(mut self) -> Parts {
        while self.at < self.text.len() {
            self.step();
        }
        self.parts
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn step(&mut self) {
        let rest = self.rest();
        if rest.starts_with("//") {
            let length = rest.find('\n').unwrap_or(rest.len());
            self.comment(length);
        } else if rest.starts_with("/*") {
            self.comment(block_comment(rest));
        } else if let Some(contents) = rest.strip_prefix('"') {
            self.string(1, quoted(contents), 1);
        } else if let Some(hashes) = self.raw_string() {
            let open = rest.find('"').map_or(rest.len(), |quote| quote + 1);
            let end = format!("\"{}", "#".repeat(hashes));
            let length = rest[open..].find(&end).unwrap_or(rest.len() - open);
            self.string(open, length, end.len());
        } else if let Some(length) = character(rest) {
            self.keep(1);
            self.blank(length - 2);
            self.keep(1);
        } else {
            let length = rest.chars().next().map_or(1, char::len_utf8);
            self.keep(length);
        }
    }

    /// The number of `#` of a raw string that begins here.
    fn raw_string(&self) -> Option<usize> {
        let before = self.parts.bare.chars().next_back();
        let rest = self.rest().strip_prefix('r')?;
        let hashes = rest.len() - rest.trim_start_matches('#').len();
        // A name may end in r; only b and c stand before the r of a raw string.
        let is_word = before.is_some_and(|c| is_name(c) && c != 'b' && c != 'c');
        (!is_word && rest[hashes..].starts_with('"')).then_some(hashes)
    }

    fn comment(&mut self, length: usize) {
        self.parts.comments.push(self.at..self.at + length);
        self.blank(length);
    }

    fn string(&mut self, open: usize, length: usize, close: usize) {
        self.keep(open);
        self.parts.strings.push(self.at..self.at + length);
        self.blank(length);
        self.keep(close.min(self.text.len() - self.at));
    }

    fn keep(&mut self, length: usize) {
        self.parts.bare.push_str(&self.rest()[..length]);
        self.at += length;
    }

    fn blank(&mut self, length: usize) {
        let blank = self.rest()[..length]
            .bytes()
            .map(|byte| if byte == b'\n' { '\n' } else { ' ' });
        self.parts.bare.extend(blank);
        self.at += length;
    }
}

/// The length of the block comment, which may hold others, at the beginning of `rest`.
fn block_comment(rest: &str) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < rest.len() {
        if rest[at..].starts_with("/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with("*/") {
            depth -= 1;
            at += 2;
        } else {
            at += rest[at..].chars().next().map_or(1, char::len_utf8);
        }
        if depth == 0 {
            return at;
        }
    }
    rest.len()
}

/// The length of a string's contents, up to its closing quote.
fn quoted(contents: &str) -> usize {
    let mut is_escaped = false;
    for (at, c) in contents.char_indices() {
        match c {
            '"' if !is_escaped => return at,
            '\\' => is_escaped = !is_escaped,
            _ => is_escaped = false,
        }
    }
    contents.len()
}

/// The length of the character literal at the beginning of `rest`; none for a lifetime.
fn character(rest: &str) -> Option<usize> {
    let inner = rest.strip_prefix('\'')?;
    let first = inner.chars().next()?;
    if first == '\\' {
        let escaped = inner[1..].chars().next()?.len_utf8();
        return inner[1 + escaped..].find('\'').map(|end| end + 3 + escaped);
    }
    inner[first.len_utf8()..]
        .starts_with('\'')
        .then(|| 2 + first.len_utf8())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_strings_and_characters_are_not_code() {
        let text =
            "a /* { /* } */ */ 'x' '\\'' '\\u{1}' \"\\\"{\" r#\"\"{\"# b\"(\" &'a str // {\nb";
        let code = Code::sample(text);
        let words: Vec<&str> = code.bare.split_whitespace().collect();
        let expected = [
            "a", "'", "'", "'", "'", "'", "'", "\"", "\"", "r#\"", "\"#", "b\"", "\"", "&'a",
            "str", "b",
        ];
        assert_eq!(words, expected);
        assert_eq!(code.bare.len(), text.len());
        assert_eq!(code.comments.len(), 2);
        assert_eq!(&text[code.strings[1].clone()], "\"{");
    }

    #[test]
    fn tests_are_separate_from_code() {
        let text = "fn a() {}\n#[cfg(test)]\nmod t {\n  fn b() {}\n}\nstruct S {\n  #[cfg(test)]\n  \
                    x: u8,\n  y: u8,\n}\n#[test]\n#[ignore]\nfn c() {}\nfn d() {}\n";
        let code = Code::sample(text);
        let in_test = |part: &str| code.in_test(text.find(part).expect("it is in the text"));
        let parts = ["fn a", "fn b", "x: u8", "y: u8", "fn c", "fn d"];
        assert_eq!(parts.map(in_test), [false, true, true, false, true, false]);
    }

    #[test]
    fn functions_have_their_lines() {
        let text = "trait T { fn none(&self); }\nfn one() -> [u8; 2] { [0; 2] }\nfn three(f: fn(u8)) \
                    {\n  f(1);\n}\n";
        let functions = Code::sample(text).functions();
        let found: Vec<(&str, usize)> = functions
            .iter()
            .map(|function| (function.name.as_str(), function.lines))
            .collect();
        assert_eq!(found, [("one", 1), ("three", 3)]);
    }
}
