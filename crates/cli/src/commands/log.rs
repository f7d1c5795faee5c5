//! `sandtree log`: the tree of states of a sandbox, or of everything.

use std::collections::HashMap;
use std::io::IsTerminal;
use std::process::ExitCode;

use sandtree::{Durability, StateInfo, StateKind, TreeKind, TreeNode};

use super::{Outcome, open};
use crate::args::{Global, sandbox_ref};
use crate::{failure, show};

#[derive(Debug, clap::Args)]
pub struct LogArgs {
    /// Show all images, snapshots and sandboxes
    #[arg(long, conflicts_with = "sandbox")]
    pub all: bool,
    /// Name or id of the sandbox
    #[arg(required_unless_present = "all", value_parser = sandbox_ref)]
    pub sandbox: Option<String>,
}

/// The depth limit of a drawn tree: damaged parent links cannot make it endless.
const DEPTH_MAX: usize = 256;

pub async fn run(global: &Global, args: LogArgs) -> Outcome {
    let bold = std::io::stdout().is_terminal();
    let host = open(global).await?;
    let Some(sandbox) = args.sandbox.filter(|_| !args.all) else {
        let tree = host.tree().await?;
        tree.broken
            .iter()
            .for_each(|error| failure::show(&error.report(), global.json));
        if global.json {
            show::json(&tree.nodes);
        } else {
            draw(&everything(&tree.nodes, bold))
                .iter()
                .for_each(|line| show::line(line));
        }
        return Ok(ExitCode::SUCCESS);
    };
    let (states, broken) = host.states(&sandbox)?;
    broken
        .iter()
        .for_each(|error| failure::show(&error.report(), global.json));
    if global.json {
        show::json(&states);
        return Ok(ExitCode::SUCCESS);
    }
    let info = host.find(&sandbox)?;
    draw(&of_sandbox(&states, &info.name, bold))
        .iter()
        .for_each(|line| show::line(line));
    Ok(ExitCode::SUCCESS)
}

/// A line of the tree, and the branches below it.
struct Branch {
    line: String,
    below: Vec<Branch>,
}

/// One line per state, children below their parents. The sandbox is below its current state.
fn of_sandbox(states: &[StateInfo], sandbox: &str, bold: bool) -> Vec<Branch> {
    let known: HashMap<&str, &StateInfo> = states
        .iter()
        .map(|state| (state.id.as_str(), state))
        .collect();
    let mut children: HashMap<Option<&str>, Vec<&StateInfo>> = HashMap::new();
    for state in states {
        let parent = state
            .parent
            .as_deref()
            .filter(|parent| known.contains_key(parent));
        children.entry(parent).or_default().push(state);
    }
    let here = format!("{}  (now)", strong(sandbox, bold));
    let stands_on_none = !states.iter().any(|state| state.current);
    states_below(&children, None, stands_on_none, &here, 0)
}

fn states_below(
    children: &HashMap<Option<&str>, Vec<&StateInfo>>,
    parent: Option<&str>,
    here_is_here: bool,
    here: &str,
    depth: usize,
) -> Vec<Branch> {
    let states = children
        .get(&parent)
        .filter(|_| depth < DEPTH_MAX)
        .map(Vec::as_slice)
        .unwrap_or_default();
    let branch = |state: &&StateInfo| Branch {
        line: describe(state),
        below: states_below(children, Some(&state.id), state.current, here, depth + 1),
    };
    let here = here_is_here.then(|| Branch {
        line: here.to_owned(),
        below: Vec::new(),
    });
    states.iter().map(branch).chain(here).collect()
}

/// Images, and below each what was made from it.
fn everything(nodes: &[TreeNode], bold: bool) -> Vec<Branch> {
    let known: HashMap<&str, &TreeNode> =
        nodes.iter().map(|node| (node.id.as_str(), node)).collect();
    let mut children: HashMap<Option<&str>, Vec<&TreeNode>> = HashMap::new();
    for node in nodes {
        let parent = node
            .parent
            .as_deref()
            .filter(|parent| known.contains_key(parent));
        children.entry(parent).or_default().push(node);
    }
    nodes_below(&children, None, bold, 0)
}

fn nodes_below(
    children: &HashMap<Option<&str>, Vec<&TreeNode>>,
    parent: Option<&str>,
    bold: bool,
    depth: usize,
) -> Vec<Branch> {
    let nodes = children
        .get(&parent)
        .filter(|_| depth < DEPTH_MAX)
        .map(Vec::as_slice)
        .unwrap_or_default();
    let branch = |node: &&TreeNode| Branch {
        line: name(node, bold),
        below: nodes_below(children, Some(&node.id), bold, depth + 1),
    };
    nodes.iter().map(branch).collect()
}

fn name(node: &TreeNode, bold: bool) -> String {
    let kind = match node.kind {
        TreeKind::Image => "image",
        TreeKind::Snapshot => "snapshot",
        TreeKind::Sandbox => "sandbox",
        TreeKind::State => "state",
    };
    let short: String = node.id.chars().take(16).collect();
    let called = if node.names.is_empty() {
        short
    } else {
        node.names.join(", ")
    };
    let called = if node.kind == TreeKind::Sandbox {
        strong(&called, bold)
    } else {
        called
    };
    let now = node.current.then(|| "(now)".to_owned());
    let rest = node
        .note
        .clone()
        .into_iter()
        .chain(node.created_at.clone())
        .chain(now);
    let rest = rest.map(|text| show::plain(&text));
    [vec![format!("{kind} {called}")], rest.collect()]
        .concat()
        .join("  ")
}

fn strong(text: &str, bold: bool) -> String {
    if bold {
        format!("\x1b[1m{text}\x1b[0m")
    } else {
        text.to_owned()
    }
}

fn draw(branches: &[Branch]) -> Vec<String> {
    let mut lines = Vec::new();
    draw_below(branches, "", &mut lines);
    lines
}

fn draw_below(branches: &[Branch], indent: &str, lines: &mut Vec<String>) {
    for (index, branch) in branches.iter().enumerate() {
        let is_last = index + 1 == branches.len();
        let (tip, more) = if is_last {
            ("└─ ", "   ")
        } else {
            ("├─ ", "│  ")
        };
        lines.push(format!("{indent}{tip}{}", branch.line));
        draw_below(&branch.below, &format!("{indent}{more}"), lines);
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
    let memory = show::bytes(state.memory_bytes);
    let disk = show::bytes(state.disk_bytes);
    let doubt = if state.durability == Durability::Failed {
        "  not durable"
    } else {
        ""
    };
    format!(
        "{name}  {}  memory {memory}  disk {disk}{doubt}",
        state.created_at
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(id: &str, parent: Option<&str>, tag: Option<&str>, current: bool) -> StateInfo {
        StateInfo {
            id: id.into(),
            tag: tag.map(str::to_owned),
            kind: if tag.is_some() {
                StateKind::Checkpoint
            } else {
                StateKind::Left
            },
            parent: parent.map(str::to_owned),
            created_at: "T".into(),
            created_at_unix_ms: 0,
            memory_bytes: 1024,
            disk_bytes: 0,
            mode: None,
            degraded: Vec::new(),
            current,
            durability: Durability::Durable,
        }
    }

    #[test]
    fn branches_are_drawn_below_their_parents() {
        let states = [
            state("1", None, Some("base"), true),
            state("2", Some("1"), Some("tried"), false),
            state("3", Some("2"), None, false),
            state("4", Some("gone"), Some("orphan"), false),
        ];
        let lines = draw(&of_sandbox(&states, "a", false));
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
    fn a_sandbox_without_states_is_drawn_alone() {
        assert_eq!(draw(&of_sandbox(&[], "a", false)), ["└─ a  (now)"]);
    }

    #[test]
    fn everything_is_drawn_below_its_origin() {
        let node = |kind, id: &str, name: &str, parent: Option<&str>| TreeNode {
            kind,
            id: id.into(),
            names: vec![name.into()],
            parent: parent.map(str::to_owned),
            created_at: None,
            note: None,
            current: false,
        };
        let nodes = [
            node(TreeKind::Image, "i", "tiny", None),
            node(TreeKind::Snapshot, "s", "dev", Some("i")),
            node(TreeKind::Sandbox, "b", "a", Some("s")),
            node(TreeKind::State, "t", "base", Some("b")),
            node(TreeKind::Sandbox, "c", "other", Some("gone")),
        ];
        let expected = [
            "├─ image tiny",
            "│  └─ snapshot dev",
            "│     └─ sandbox a",
            "│        └─ state base",
            "└─ sandbox other",
        ];
        assert_eq!(draw(&everything(&nodes, false)), expected);
    }
}
