//! The programs that Rust sources start.

use std::collections::BTreeSet;

use super::{Start, shell};
use crate::sources::Source;

const NEW: &str = "Command::new(";
const DECLARED: &str = "// starts: ";
const OURS: &str = "our own program";
const NOTHING: &str = "nothing";
/// Arguments that are programs of this workspace.
const OUR_PROGRAMS: [&str; 3] = ["program()", "example(", "env!(\"CARGO_BIN_EXE_"];
/// `"-c"` of a shell stands so near.
const NEARBY: usize = 40;
/// A declaration stands on the line of what it declares, or so many lines before.
const ABOVE: usize = 1;

/// A function whose calls start what their first literal says.
struct Helper {
    /// As it is called, up to its argument.
    call: String,
    /// Where, as the beginning of a path.
    within: String,
    takes: Takes,
}

#[derive(Clone, Copy, PartialEq)]
enum Takes {
    Program,
    Script,
}

/// The programs that the sources start, and the places where the program is not known.
pub fn starts(sources: &[Source]) -> (BTreeSet<Start>, Vec<String>) {
    let mut helpers: Vec<Helper> = sources.iter().flat_map(declared_helpers).collect();
    helpers.push(Helper {
        call: NEW.to_owned(),
        within: String::new(),
        takes: Takes::Program,
    });
    let mut starts = BTreeSet::new();
    let mut unclear = Vec::new();
    for source in sources {
        for helper in helpers
            .iter()
            .filter(|helper| source.path.starts_with(&helper.within))
        {
            for call in calls(source, helper) {
                match call.starts() {
                    Some(started) => starts.extend(started),
                    None => unclear.push(call.complaint()),
                }
            }
        }
    }
    (starts, unclear)
}

fn declared_helpers(source: &Source) -> Vec<Helper> {
    let declared = source
        .text
        .lines()
        .filter_map(|line| line.trim().strip_prefix(DECLARED));
    let helper = |line: &str| {
        let (takes, rest) = match line.strip_prefix("the program of ") {
            Some(rest) => (Takes::Program, rest),
            None => (Takes::Script, line.strip_prefix("the script of ")?),
        };
        let (name, place) = rest
            .split_once('…')
            .unwrap_or_else(|| panic!("{}: no helper: {line}", source.path));
        let within = place
            .split_once(" in ")
            .map_or_else(|| directory(&source.path), |(_, dir)| dir.to_owned());
        Some(Helper {
            call: name.to_owned(),
            within,
            takes,
        })
    };
    declared.filter_map(helper).collect()
}

/// The module's directory: `a/b` for `a/b/mod.rs`, `a/b/main.rs` and `a/b/c.rs`.
fn directory(path: &str) -> String {
    path.rsplit_once('/')
        .map_or(String::new(), |(dir, _)| dir.to_owned())
}

/// A call of a helper.
struct Call<'a> {
    source: &'a Source,
    helper: &'a Helper,
    /// Where its arguments begin.
    arguments: usize,
}

fn calls<'a>(source: &'a Source, helper: &'a Helper) -> Vec<Call<'a>> {
    let is_call = |at: &usize| {
        let before = &source.text[..*at];
        let line = before.rsplit('\n').next().unwrap_or_default();
        let is_name =
            |c: char| c.is_alphanumeric() || c == '_' || (c == '.' && !helper.call.contains('.'));
        !line.contains("//") && !line.ends_with("fn ") && !before.ends_with(is_name)
    };
    let found = source.text.match_indices(&helper.call).map(|(at, _)| at);
    found
        .filter(is_call)
        .map(|at| Call {
            source,
            helper,
            arguments: at + helper.call.len(),
        })
        .collect()
}

impl Call<'_> {
    /// What it starts; `None` if that is not known.
    fn starts(&self) -> Option<Vec<Start>> {
        let arguments = &self.source.text[self.arguments..];
        if let Some(declared) = self.declaration() {
            let named = |program: &str| self.start(program.trim());
            let is_helper =
                declared.starts_with("the ") || declared.starts_with(OURS) || declared == NOTHING;
            return Some(if is_helper {
                Vec::new()
            } else {
                declared.split(',').map(named).collect()
            });
        }
        if OUR_PROGRAMS.iter().any(|ours| arguments.starts_with(ours)) {
            return Some(Vec::new());
        }
        match self.helper.takes {
            Takes::Script => Some(self.script(&self.text_of(arguments)?)),
            Takes::Program => {
                let (program, rest) = literal(arguments)?;
                let mut starts = installed(&program)
                    .map(|program| self.start(program))
                    .into_iter()
                    .collect::<Vec<_>>();
                if ["sh", "bash"].contains(&program.as_str()) {
                    let nearby = &rest[..rest.find("\"-c\",").filter(|at| *at < NEARBY)?];
                    let script = &rest[nearby.len() + "\"-c\",".len()..];
                    starts.extend(self.script(&self.text_of(script)?));
                }
                Some(starts)
            }
        }
    }

    /// A literal, or the one that a name was last bound to.
    fn text_of(&self, argument: &str) -> Option<String> {
        if let Some((text, _)) = literal(argument) {
            return Some(text);
        }
        let is_name = |c: &char| c.is_alphanumeric() || *c == '_';
        let name: String = argument.trim_start().chars().take_while(is_name).collect();
        let before = &self.source.text[..self.arguments];
        let all = &self.source.text[..];
        let bound = |text: &str, binding: String| text.rfind(&binding).map(|at| at + binding.len());
        let at = bound(before, format!("let {name} ="))
            .or_else(|| bound(all, format!("const {name}: &str =")))?;
        literal(&all[at..]).map(|(text, _)| text)
    }

    fn script(&self, script: &str) -> Vec<Start> {
        shell::starts(script, |_| self.at()).into_iter().collect()
    }

    fn start(&self, program: &str) -> Start {
        Start {
            program: program.to_owned(),
            at: self.at(),
        }
    }

    /// What a comment on this line or just above says.
    fn declaration(&self) -> Option<&str> {
        let line = self.source.text[..self.arguments].matches('\n').count();
        let nearby = self
            .source
            .text
            .lines()
            .skip(line.saturating_sub(ABOVE))
            .take(line.min(ABOVE) + 1);
        let declared = nearby
            .filter_map(|line| line.split_once(DECLARED))
            .map(|(_, declared)| declared.trim());
        declared.reduce(|_, last| last)
    }

    fn at(&self) -> String {
        self.source.at(self.arguments)
    }

    fn complaint(&self) -> String {
        format!(
            "{}: what is started here? Say it by a comment, `{DECLARED}…`: see tests/tidy/programs.rs",
            self.at()
        )
    }
}

/// The name of a program that a package installs. A path to anywhere else is the test's own.
fn installed(program: &str) -> Option<&str> {
    match program.rsplit_once('/') {
        Some((dir, name)) => ["/bin", "/sbin", "/usr/bin", "/usr/sbin"]
            .contains(&dir)
            .then_some(name),
        None => Some(program),
    }
}

/// The string literal that an argument begins with, its escapes undone, and what follows it. A
/// reference, a slice and `format!` around it do not matter.
fn literal(text: &str) -> Option<(String, &str)> {
    let mut rest = text.trim_start();
    while let Some(inner) = ["&", "[", "format!("]
        .iter()
        .find_map(|prefix| rest.strip_prefix(prefix))
    {
        rest = inner.trim_start();
    }
    if let Some(raw) = rest.strip_prefix("r#\"") {
        let end = raw.find("\"#")?;
        return Some((raw[..end].to_owned(), &raw[end + 2..]));
    }
    if let Some(raw) = rest.strip_prefix("r\"") {
        let end = raw.find('"')?;
        return Some((raw[..end].to_owned(), &raw[end + 1..]));
    }
    let body = rest.strip_prefix('"')?;
    let mut value = String::new();
    let mut characters = body.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Some((value, &body[at + 1..])),
            '\\' => match characters.next()?.1 {
                'n' => value.push('\n'),
                '\n' => value.push(' '),
                other => value.push(other),
            },
            other => value.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn programs_of(text: &str) -> (Vec<String>, usize) {
        let source = Source {
            path: "a/b.rs".to_owned(),
            text: text.to_owned(),
        };
        let (starts, unclear) = starts(&[source]);
        (
            starts.into_iter().map(|start| start.program).collect(),
            unclear.len(),
        )
    }

    #[test]
    fn programs_are_found_by_literal_helper_and_declaration() {
        assert_eq!(
            programs_of(r#"Command::new("cpio").arg("-o")"#),
            (vec!["cpio".to_owned()], 0)
        );
        assert_eq!(programs_of("Command::new(program)"), (vec![], 1));
        let helper = "fn tool(name: &str) {\n    // starts: the program of tool(…)\n    Command::new(name)\n}\n";
        assert_eq!(
            programs_of(&format!("{helper}x(tool(\"xz\"))")),
            (vec!["xz".to_owned()], 0)
        );
        assert_eq!(programs_of(&format!("{helper}tool(program)")), (vec![], 1));
        let declared = format!("{helper}\n\n// starts: a, b\ntool(program)");
        assert_eq!(
            programs_of(&declared),
            (vec!["a".to_owned(), "b".to_owned()], 0)
        );
        let shell = r#"Command::new("sh").args(["-c", "x | y"])"#;
        assert_eq!(programs_of(shell).0, ["sh", "x", "y"]);
        let named = "const S: &str = r#\"x\"#;\nCommand::new(\"sh\").args([\"-c\", S])";
        assert_eq!(programs_of(named).0, ["sh", "x"]);
    }
}
