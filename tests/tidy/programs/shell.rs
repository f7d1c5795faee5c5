//! The programs that a shell script starts: the words that stand where a command begins.
//!
//! This reads only as much of the shell's language as our scripts use. A word with a variable in it
//! is not looked at, nor is a script in quotes.

use std::collections::BTreeSet;

use super::Start;

/// Words that the shell knows itself.
const BUILTIN: &str = "! . : [ [[ ]] { } break case cd command continue do done echo elif else esac eval exec exit export \
    false fi for function if in kill local mapfile printf pwd read return set shift test then time trap true type ulimit \
    umask unset until wait while";
/// Words after which another command begins.
const BEFORE_COMMAND: &str = "! { do elif else exec if then time until while";
/// Programs and functions that start what their arguments say.
const STARTS_ARGUMENTS: &str = "env nice run_as_root setsid sudo unshare xargs";

/// What a script starts. `at` makes the name of a place from an offset in the script.
pub fn starts(script: &str, at: impl Fn(usize) -> String) -> BTreeSet<Start> {
    let mut scanner = Scanner {
        text: script.as_bytes(),
        at: 0,
        commands: Vec::new(),
        functions: BTreeSet::new(),
    };
    scanner.scan(Inside::Script);
    let Scanner {
        commands,
        functions,
        ..
    } = scanner;
    let words = commands.iter().flat_map(|words| programs(words));
    let is_started = |word: &&Word| is_program(&word.text) && !is_in(BUILTIN, &word.text);
    let started = words
        .filter(is_started)
        .filter(|word| !functions.contains(&word.text));
    started
        .map(|word| Start {
            program: word.text.clone(),
            at: at(word.offset),
        })
        .collect()
}

fn is_in(list: &str, word: &str) -> bool {
    list.split_whitespace().any(|known| known == word)
}

fn is_program(word: &str) -> bool {
    let of_name = |c: char| c.is_ascii_alphanumeric() || "_.+-".contains(c);
    word.starts_with(|c: char| c.is_ascii_lowercase()) && word.chars().all(of_name)
}

fn is_assignment(word: &str) -> bool {
    let Some((name, _)) = word.split_once('=') else {
        return false;
    };
    let name = name.strip_suffix('+').unwrap_or(name);
    !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// The programs of one simple command: its first word, and what that starts in turn.
fn programs(words: &[Word]) -> Vec<&Word> {
    let is_before = |word: &Word| is_assignment(&word.text) || is_in(BEFORE_COMMAND, &word.text);
    let mut rest = &words[words.iter().take_while(|word| is_before(word)).count()..];
    let mut found = Vec::new();
    while let Some((first, arguments)) = rest.split_first() {
        found.push(first);
        if !is_in(STARTS_ARGUMENTS, &first.text) {
            break;
        }
        let is_option = |word: &Word| is_assignment(&word.text) || word.text.starts_with('-');
        rest = &arguments[arguments.iter().take_while(|word| is_option(word)).count()..];
    }
    found
}

#[derive(Debug, Default, Clone)]
struct Word {
    offset: usize,
    /// With `$` for whatever is not known before it runs.
    text: String,
}

/// What the scanner is inside of, and so what ends it.
#[derive(Clone, Copy, PartialEq)]
enum Inside {
    Script,
    /// `( … )` or `$( … )`
    Parentheses,
    /// `name=( … )`: words, not commands.
    Array,
}

struct Scanner<'a> {
    text: &'a [u8],
    at: usize,
    commands: Vec<Vec<Word>>,
    functions: BTreeSet<String>,
}

impl Scanner<'_> {
    fn peek(&self, ahead: usize) -> u8 {
        self.text.get(self.at + ahead).copied().unwrap_or(0)
    }

    fn begins_with(&self, what: &str) -> bool {
        self.text[self.at..].starts_with(what.as_bytes())
    }

    /// Reads commands up to the end of what it is inside of.
    fn scan(&mut self, inside: Inside) {
        let mut command = Vec::new();
        let mut here_documents = Vec::new();
        let mut is_target = false;
        while self.at < self.text.len() {
            match self.peek(0) {
                b')' if inside != Inside::Script => {
                    self.at += 1;
                    break;
                }
                b'#' => self.skip_line(),
                b'\\' if self.peek(1) == b'\n' => self.at += 2,
                b' ' | b'\t' => self.at += 1,
                b'<' if self.begins_with("<<<") => {
                    self.at += 3;
                    is_target = true;
                }
                b'<' if self.begins_with("<<") => here_documents.push(self.here_document()),
                b'<' | b'>' if self.peek(1) == b'(' => {
                    self.at += 2;
                    self.scan(Inside::Parentheses);
                    is_target = false;
                }
                b'<' | b'>' => {
                    self.at += 1;
                    while b"<>&|".contains(&self.peek(0)) {
                        self.at += 1;
                    }
                    is_target = true;
                }
                b'\n' | b';' | b'&' | b'|' | b'(' | b')' => {
                    self.separator(&mut here_documents);
                    self.finish(&mut command, inside);
                    is_target = false;
                }
                _ => {
                    let word = self.word();
                    if !std::mem::take(&mut is_target)
                        && !self.is_definition(&word)
                        && !self.is_number_of(&word)
                    {
                        command.push(word);
                    }
                }
            }
        }
        self.finish(&mut command, inside);
    }

    fn finish(&mut self, command: &mut Vec<Word>, inside: Inside) {
        let command = std::mem::take(command);
        if inside != Inside::Array && !command.is_empty() {
            self.commands.push(command);
        }
    }

    /// One character that ends a command; after a line, the documents that it announced.
    fn separator(&mut self, here_documents: &mut Vec<String>) {
        let is_line_end = self.peek(0) == b'\n';
        self.at += 1;
        if !is_line_end {
            return;
        }
        for end in here_documents.drain(..) {
            while self.at < self.text.len() {
                let begin = self.at;
                self.skip_line();
                let line = self.text[begin..self.at].trim_ascii();
                self.at += 1;
                if line == end.as_bytes() {
                    break;
                }
            }
        }
    }

    fn skip_line(&mut self) {
        while self.at < self.text.len() && self.peek(0) != b'\n' {
            self.at += 1;
        }
    }

    /// The word that ends a here document.
    fn here_document(&mut self) -> String {
        self.at += 2;
        while b" -".contains(&self.peek(0)) {
            self.at += 1;
        }
        self.word().text
    }

    /// `name()` begins a function.
    fn is_definition(&mut self, word: &Word) -> bool {
        let is_definition = self.begins_with("()");
        if is_definition {
            self.at += 2;
            self.functions.insert(word.text.clone());
        }
        is_definition
    }

    /// The 2 of `2>`.
    fn is_number_of(&self, word: &Word) -> bool {
        b"<>".contains(&self.peek(0)) && word.text.bytes().all(|c| c.is_ascii_digit())
    }

    fn word(&mut self) -> Word {
        let mut word = Word {
            offset: self.at,
            text: String::new(),
        };
        while self.at < self.text.len() {
            match self.peek(0) {
                b' ' | b'\t' | b'\n' | b';' | b'&' | b'|' | b'<' | b'>' | b')' => break,
                b'(' if word.text.ends_with('=') => {
                    self.at += 1;
                    self.scan(Inside::Array);
                    word.text.push('$');
                }
                b'(' => break,
                b'\'' => self.single_quoted(&mut word),
                b'"' => self.double_quoted(&mut word),
                b'$' => self.expansion(&mut word),
                b'\\' => {
                    self.at += 1;
                    self.character(&mut word);
                }
                _ => self.character(&mut word),
            }
        }
        word
    }

    fn character(&mut self, word: &mut Word) {
        word.text.push(char::from(self.peek(0)));
        self.at += 1;
    }

    fn single_quoted(&mut self, word: &mut Word) {
        self.at += 1;
        while self.at < self.text.len() && self.peek(0) != b'\'' {
            self.character(word);
        }
        self.at += 1;
    }

    fn double_quoted(&mut self, word: &mut Word) {
        self.at += 1;
        while self.at < self.text.len() && self.peek(0) != b'"' {
            match self.peek(0) {
                b'$' => self.expansion(word),
                b'\\' => {
                    self.at += 1;
                    self.character(word);
                }
                _ => self.character(word),
            }
        }
        self.at += 1;
    }

    /// `$name`, `${…}`, `$((…))`, `$'…'` or `$(…)`, of which only the last starts anything.
    fn expansion(&mut self, word: &mut Word) {
        word.text.push('$');
        self.at += 1;
        match self.peek(0) {
            b'(' if self.peek(1) == b'(' => self.balanced(b'(', b')'),
            b'(' => {
                self.at += 1;
                self.scan(Inside::Parentheses);
            }
            b'{' => self.balanced(b'{', b'}'),
            _ => {}
        }
    }

    fn balanced(&mut self, open: u8, close: u8) {
        let mut depth = 0;
        while self.at < self.text.len() {
            let character = self.peek(0);
            self.at += 1;
            depth += i32::from(character == open) - i32::from(character == close);
            if depth == 0 {
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn programs_of(script: &str) -> Vec<String> {
        starts(script, |offset| format!("{offset:04}"))
            .into_iter()
            .map(|start| start.program)
            .collect()
    }

    #[test]
    fn programs_are_the_words_where_commands_begin() {
        for (script, programs) in [
            (
                "# cpio\ntar x; gzip | sort && id || head",
                &["gzip", "head", "id", "sort", "tar"][..],
            ),
            (
                "if ! grep -q x <f 2>/dev/null; then sed; fi",
                &["grep", "sed"],
            ),
            (
                "x=1 y=$(id -u) env A=b -i nice cp a b",
                &["cp", "env", "id", "nice"],
            ),
            ("a=(cp \"$(stat x)\") && b+=(mv)", &["stat"]),
            (
                "f() { cat; }\nf | \"$program\" x ${y:-rm} $((rm + 1)) 'mv; rm'",
                &["cat"],
            ),
            ("cat <<'END' | tr a b\nrm x\nEND\nwc", &["cat", "tr", "wc"]),
            (
                "while read -r a; do cut; done < <(seq 5) >&2",
                &["cut", "seq"],
            ),
            (
                "cat <<<\"$(date)\" >out && exec make \\\n test",
                &["cat", "date", "make"],
            ),
            ("exec 9>lock; command -v cpio; printf x", &[]),
        ] {
            assert_eq!(programs_of(script), programs, "{script}");
        }
    }
}
