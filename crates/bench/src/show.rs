//! Figures on stdout, notes on stderr.

use sandtree::Error;

pub fn notes(notes: &[String]) {
    for note in notes {
        eprintln!("sandtree-bench: note: {note}");
    }
}

/// Prints aligned columns.
pub fn table(header: &[&str], rows: &[Vec<String>]) {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([header[column].len()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let header: Vec<String> = header.iter().map(|cell| (*cell).to_owned()).collect();
    for cells in std::iter::once(&header).chain(rows) {
        let padded: Vec<String> = cells
            .iter()
            .zip(&widths)
            .map(|(cell, width)| format!("{cell:width$}"))
            .collect();
        println!("{}", padded.join("  ").trim_end());
    }
}

/// An error with its causes.
pub fn one_line(error: &Error) -> String {
    let report = error.report();
    [vec![report.message], report.causes].concat().join(": ")
}

pub fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// A number with about three digits.
pub fn number(value: f64) -> String {
    match value.abs() {
        large if large >= 100.0 => format!("{value:.0}"),
        middle if middle >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}
