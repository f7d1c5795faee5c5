//! Prints results, as text or as JSON.

use std::io::{self, Write};

use sandtree::{Degradation, RestoreReport};
use serde::Serialize;

use crate::hint;

/// Prints one line to stdout. A reader that has exited is no error.
pub fn line(text: &str) {
    ignore_broken_pipe(writeln!(io::stdout().lock(), "{text}"));
}

pub fn json(value: &impl Serialize) {
    line(&serde_json::to_string(value).expect("answers are always JSON"));
}

fn ignore_broken_pipe(written: io::Result<()>) {
    match written {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            eprintln!("sandtree: cannot write to stdout: {error}");
        }
        _ => {}
    }
}

/// Prints notes on stderr, for people.
pub fn notes(notes: &[String]) {
    notes.iter().for_each(|text| note(text));
}

fn note(text: &str) {
    eprintln!("sandtree: note: {}", plain(text));
}

/// Prints degradations on stderr, for people.
pub fn degradations(degradations: &[Degradation]) {
    for degradation in degradations {
        note(&degradation.to_string());
        if let Some(hint) = hint::of_degradation(degradation) {
            eprintln!("  hint: {}", plain(&hint));
        }
    }
}

/// Degradations in one field.
pub fn joined(degradations: &[Degradation]) -> String {
    let texts: Vec<String> = degradations.iter().map(ToString::to_string).collect();
    texts.join("; ")
}

/// Escapes control characters in text from other programs.
pub fn plain(text: &str) -> String {
    let shown = |c: char| match c {
        '\n' | '\t' => c.to_string(),
        c if c.is_control() => c.escape_default().to_string(),
        c => c.to_string(),
    };
    text.chars().map(shown).collect()
}

/// Prints the degradations of a restore.
pub fn restore_notes(report: &RestoreReport) {
    degradations(&report.degraded);
    let hooks: Vec<String> = report
        .hooks_failed
        .iter()
        .map(|hook| format!("hook {hook}"))
        .collect();
    notes(&hooks);
}

pub fn ms(value: f64) -> String {
    if value >= 1000.0 {
        format!("{:.2} s", value / 1000.0)
    } else {
        format!("{value:.1} ms")
    }
}

/// Prints aligned columns.
pub fn table(header: &[&str], rows: &[Vec<String>]) {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([header[column].len()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let show = |cells: &[String]| {
        let cells: Vec<String> = cells.iter().map(|cell| plain(cell)).collect();
        let padded: Vec<String> = cells
            .iter()
            .zip(&widths)
            .map(|(cell, width)| format!("{cell:width$}"))
            .collect();
        line(padded.join("  ").trim_end());
    };
    show(&header.iter().map(|h| (*h).to_owned()).collect::<Vec<_>>());
    rows.iter().for_each(|row| show(row));
}

/// Prints names and values, aligned.
pub fn fields(fields: &[(&str, String)]) {
    let width = fields.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    for (name, value) in fields {
        line(&format!("{name:width$}  {}", plain(value)));
    }
}

/// A size in the largest unit that keeps it readable.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 || value.fract() == 0.0 {
        format!("{value:.0} {}", UNITS[unit])
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn text_of_others_cannot_control_the_terminal() {
        assert_eq!(
            super::plain("a\x1b[2Jb\r\u{9b}c\n"),
            "a\\u{1b}[2Jb\\r\\u{9b}c\n"
        );
    }

    #[test]
    fn sizes_are_short() {
        assert_eq!(super::bytes(5), "5 B");
        assert_eq!(super::bytes(512 << 20), "512 MiB");
        assert_eq!(super::bytes(1536), "1.5 KiB");
    }
}
