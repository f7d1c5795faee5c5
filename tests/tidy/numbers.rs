//! The size of the code in numbers, as `scripts/numbers` prints them and CONTRIBUTING.md records
//! them.
//!
//! ```text
//!   code      lines with code outside of tests; doc: `///` and `//!`; tests: lines with code in tests
//!   fns       functions outside of tests, with the median, the 90th percentile and the largest
//!             number of lines, from `fn` to the closing brace; over 70: how many are longer
//!   tok/line  words, numbers, strings and signs on a line of code
//!   cycle     modules in the largest group that import each other in a circle
//! ```

use std::fmt::Write;

use crate::code::{Code, is_name};
use crate::modules::{self, Crate};
use crate::sources;

#[derive(Default)]
struct Numbers {
    files: usize,
    code: usize,
    doc: usize,
    test: usize,
    function_lines: Vec<usize>,
    tokens: usize,
    unsafes: usize,
    expects: usize,
    unreachables: usize,
    cycle: usize,
}

/// The table, with a row for each crate, one for all crates, and one for the tests with guests.
pub fn table() -> String {
    let mut total = Numbers::default();
    let mut text = String::from(
        "| crate | files | code | doc | tests | fns | median | p90 | max | over 70 | tok/line | unsafe | \
         expect | unreachable | cycle |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    for read in modules::crates() {
        let numbers = of_crate(&read);
        text.push_str(&numbers.row(&read.name));
        total.add(numbers);
    }
    text.push_str(&total.row("all crates"));
    let vm = sources::rust(&["tests/vm"]).into_iter().map(Code::new);
    text.push_str(&of_files(vm.collect::<Vec<_>>().iter()).row("tests/vm"));
    text
}

fn of_crate(read: &Crate) -> Numbers {
    let mut numbers = of_files(read.files.iter().map(|file| &file.code));
    numbers.cycle = read.graph().largest_cycle().len();
    numbers
}

fn of_files<'a>(files: impl Iterator<Item = &'a Code>) -> Numbers {
    let mut numbers = Numbers::default();
    for file in files {
        numbers.files += 1;
        numbers.count_lines(file);
        numbers.count_functions(file);
        numbers.unsafes += count(file, "unsafe {") + count(file, "unsafe impl");
        numbers.expects += count(file, ".expect(");
        numbers.unreachables += count(file, "unreachable!(");
    }
    numbers
}

/// How often a text is in a file's code outside of tests.
fn count(file: &Code, text: &str) -> usize {
    file.places(text).filter(|&at| !file.in_test(at)).count()
}

impl Numbers {
    fn count_lines(&mut self, file: &Code) {
        let mut offset = 0;
        for line in file.source.text.split('\n') {
            let begin = line.trim_start();
            let is_doc = begin.starts_with("///") || begin.starts_with("//!");
            let bare = file.bare_line(offset);
            let has_code = !bare.trim().is_empty();
            if is_doc {
                self.doc += 1;
            } else if has_code && file.in_test(offset) {
                self.test += 1;
            } else if has_code {
                self.code += 1;
                self.tokens += tokens(bare);
            }
            offset += line.len() + 1;
        }
    }

    fn count_functions(&mut self, file: &Code) {
        let functions = file.functions().into_iter();
        let product = functions.filter(|function| !file.in_test(function.range.start));
        self.function_lines
            .extend(product.map(|function| function.lines));
    }

    fn add(&mut self, other: Numbers) {
        self.files += other.files;
        self.code += other.code;
        self.doc += other.doc;
        self.test += other.test;
        self.function_lines.extend(other.function_lines);
        self.tokens += other.tokens;
        self.unsafes += other.unsafes;
        self.expects += other.expects;
        self.unreachables += other.unreachables;
        self.cycle = self.cycle.max(other.cycle);
    }

    fn row(&self, name: &str) -> String {
        let mut lines = self.function_lines.clone();
        lines.sort_unstable();
        let at = |hundredth: usize| {
            lines
                .get(lines.len() * hundredth / 100)
                .copied()
                .unwrap_or(0)
        };
        let longest = lines.last().copied().unwrap_or(0);
        let long = lines.iter().filter(|lines| **lines > 70).count();
        let density = self.tokens as f64 / self.code.max(1) as f64;
        let mut row = format!(
            "| {name} | {} | {} | {} | {} ",
            self.files, self.code, self.doc, self.test
        );
        write!(
            row,
            "| {} | {} | {} | {longest} | {long} ",
            lines.len(),
            at(50),
            at(90)
        )
        .expect("a String takes everything");
        write!(row, "| {density:.1} | {} | {} ", self.unsafes, self.expects)
            .expect("a String takes everything");
        format!("{row}| {} | {} |\n", self.unreachables, self.cycle)
    }
}

/// Words and numbers, strings, and signs; signs of two or three characters are one.
fn tokens(bare: &str) -> usize {
    let signs = [
        "..=", "...", "<<=", ">>=", "->", "=>", "::", "==", "!=", "<=", ">=", "&&", "||", "..",
        "+=", "-=", "*=", "/=", "|=", "&=", "^=", "%=",
    ];
    let mut rest = bare.trim_start();
    let mut found = 0;
    while let Some(first) = rest.chars().next() {
        let sign = signs.iter().find(|sign| rest.starts_with(**sign));
        let length = if is_name(first) {
            rest.find(|c| !is_name(c)).unwrap_or(rest.len())
        } else if first == '"' {
            rest[1..].find('"').map_or(rest.len(), |end| end + 2)
        } else {
            sign.map_or(first.len_utf8(), |sign| sign.len())
        };
        found += 1;
        rest = rest[length..].trim_start();
    }
    found
}

#[test]
fn a_small_crate_has_its_numbers() {
    let text = "//! Words.\n\nfn f() -> u8 {\n    g(\"a b\").expect(\"it does\") // why\n}\n\n#[cfg(test)]\nmod tests {\n}\n";
    let read = Crate::sample("a", &[("crates/a/src/lib.rs", text)]);
    let row = of_crate(&read).row("a");
    assert_eq!(
        row,
        "| a | 1 | 3 | 1 | 3 | 1 | 3 | 3 | 3 | 0 | 5.7 | 0 | 1 | 0 | 0 |\n"
    );
}

#[test]
fn the_table_has_a_row_for_each_crate() {
    let rows = 4 + sources::directories("crates").len();
    assert_eq!(table().lines().count(), rows);
}
