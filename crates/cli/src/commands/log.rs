//! `sandtree log`: the tree of states of a sandbox.

use std::collections::HashMap;
use std::io::IsTerminal;
use std::process::ExitCode;

use sandtree::{StateInfo, StateKind};

use super::{Outcome, open};
use crate::args::{Global, Named};
use crate::{failure, show};

pub async fn run(global: &Global, args: Named) -> Outcome {
    let host = open(global).await?;
    let (states, broken) = host.states(&args.sandbox)?;
    broken.iter().for_each(|error| failure::show(&error.report(), global.json));
    if global.json {
        show::json(&states);
        return Ok(ExitCode::SUCCESS);
    }
    let info = host.find(&args.sandbox)?;
    let bold = std::io::stdout().is_terminal();
    tree(&states, &info.name, bold).iter().for_each(|line| show::line(line));
    Ok(ExitCode::SUCCESS)
}

/// One line per state, children below their parents; the sandbox itself below the state it stands on.
fn tree(states: &[StateInfo], sandbox: &str, bold: bool) -> Vec<String> {
    let known: HashMap<&str, &StateInfo> = states.iter().map(|state| (state.id.as_str(), state)).collect();
    let mut children: HashMap<Option<&str>, Vec<&StateInfo>> = HashMap::new();
    for state in states {
        let parent = state.parent.as_deref().filter(|parent| known.contains_key(parent));
        children.entry(parent).or_default().push(state);
    }
    let here = if bold { format!("\x1b[1m{sandbox}\x1b[0m  (now)") } else { format!("{sandbox}  (now)") };
    let mut lines = Vec::new();
    let stands_on_none = !states.iter().any(|state| state.current);
    draw(&children, None, "", stands_on_none, &here, &mut lines);
    lines
}

fn draw(
    children: &HashMap<Option<&str>, Vec<&StateInfo>>,
    parent: Option<&str>,
    indent: &str,
    here_is_here: bool,
    here: &str,
    lines: &mut Vec<String>,
) {
    let below = children.get(&parent).map(Vec::as_slice).unwrap_or_default();
    let count = below.len() + usize::from(here_is_here);
    let branch = |index: usize| if index + 1 == count { ("└─ ", "   ") } else { ("├─ ", "│  ") };
    for (index, state) in below.iter().enumerate() {
        let (tip, more) = branch(index);
        lines.push(format!("{indent}{tip}{}", describe(state)));
        let deeper = format!("{indent}{more}");
        draw(children, Some(&state.id), &deeper, state.current, here, lines);
    }
    if here_is_here {
        lines.push(format!("{indent}{}{here}", branch(below.len()).0));
    }
}

fn describe(state: &StateInfo) -> String {
    let name = match (&state.tag, state.kind) {
        (Some(tag), _) => tag.clone(),
        (None, StateKind::Left) => format!("(left) {}", state.id),
        (None, StateKind::Paused) => format!("(paused) {}", state.id),
        (None, StateKind::Auto) => format!("(auto) {}", state.id),
        (None, _) => state.id.clone(),
    };
    let (memory, disk) = (show::bytes(state.memory_bytes), show::bytes(state.disk_bytes));
    format!("{name}  {}  memory {memory}  disk {disk}", state.created_at)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(id: &str, parent: Option<&str>, tag: Option<&str>, current: bool) -> StateInfo {
        StateInfo {
            id: id.into(),
            tag: tag.map(str::to_owned),
            kind: if tag.is_some() { StateKind::Checkpoint } else { StateKind::Left },
            parent: parent.map(str::to_owned),
            created_at: "T".into(),
            created_at_unix_ms: 0,
            memory_bytes: 1024,
            disk_bytes: 0,
            mode: None,
            degraded: Vec::new(),
            current,
        }
    }

    #[test]
    fn branches_are_drawn_below_what_they_stand_on() {
        let states = [
            state("1", None, Some("base"), true),
            state("2", Some("1"), Some("tried"), false),
            state("3", Some("2"), None, false),
            state("4", Some("gone"), Some("orphan"), false),
        ];
        let lines = tree(&states, "a", false);
        let size = "  T  memory 1 KiB  disk 0 B";
        let expected = [
            format!("├─ base{size}"),
            format!("│  ├─ tried{size}"),
            format!("│  │  └─ (left) 3{size}"),
            "│  └─ a  (now)".to_owned(),
            format!("└─ orphan{size}"),
        ];
        assert_eq!(lines, expected);
    }

    #[test]
    fn a_sandbox_without_states_stands_alone() {
        assert_eq!(tree(&[], "a", false), ["└─ a  (now)"]);
    }
}
