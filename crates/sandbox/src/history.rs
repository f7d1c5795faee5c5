//! Undo and redo: two stacks of states around the present. Pure functions.
//!
//! ```text
//!   past:  c1  c2  [c3]    present    [f2]  f1  :future
//!                   ^ undo goes here   ^ redo goes here
//! ```
//!
//! Always: when the present is left, its state is on one of the stacks, if it could be kept. A
//! checkpoint or a revert empties the future.

use sandtree_store::{Head, StateId};

/// A move from the present to another state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Step {
    pub target: StateId,
    way: Way,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Way {
    Revert,
    Undo { count: usize },
    Redo,
}

/// A move to any state; it empties the future.
pub(crate) fn revert(target: StateId) -> Step {
    Step {
        target,
        way: Way::Revert,
    }
}

/// `count` steps back; `None` if there are fewer.
pub(crate) fn undo(head: &Head, count: usize) -> Option<Step> {
    let index = head.past.len().checked_sub(count).filter(|_| count > 0)?;
    Some(Step {
        target: head.past.get(index)?.clone(),
        way: Way::Undo { count },
    })
}

pub(crate) fn redo(head: &Head) -> Option<Step> {
    Some(Step {
        target: head.future.last()?.clone(),
        way: Way::Redo,
    })
}

/// A state of the present was taken, and the present continues.
pub(crate) fn taken(head: &mut Head, state: StateId) {
    head.past.push(state.clone());
    head.future.clear();
    head.parent = Some(state);
}

/// Work starts directly on a state reached by undo or redo: push it onto `past`, so that undo
/// returns to it. Returns whether `head` changed.
pub(crate) fn going_on(head: &mut Head) -> bool {
    let Some(parent) = head
        .parent
        .clone()
        .filter(|parent| head.past.last() != Some(parent))
    else {
        return false;
    };
    taken(head, parent);
    true
}

/// The move was made; `left` is the state of the present before it.
pub(crate) fn moved(head: &mut Head, step: &Step, left: Option<StateId>) {
    match step.way {
        Way::Revert => {
            head.past.extend(left);
            head.future.clear();
        }
        Way::Undo { count } => {
            let walked = head.past.split_off(head.past.len() - count);
            head.future.extend(left);
            head.future.extend(walked.into_iter().skip(1).rev());
        }
        Way::Redo => {
            head.future.pop();
            head.past.extend(left);
        }
    }
    head.parent = Some(step.target.clone());
}

/// A state is removed: neither stack lists it any more.
pub(crate) fn forget(head: &mut Head, state: &StateId) {
    head.past.retain(|id| id != state);
    head.future.retain(|id| id != state);
    if head.parent.as_ref() == Some(state) {
        head.parent = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u32) -> StateId {
        format!("{number:016x}").parse().unwrap()
    }

    fn numbers(states: &[StateId]) -> Vec<u32> {
        states
            .iter()
            .map(|id| u32::from_str_radix(id.as_str(), 16).unwrap())
            .collect()
    }

    fn head(past: &[u32]) -> Head {
        let mut head = Head::new(None, Vec::new());
        past.iter().for_each(|number| taken(&mut head, id(*number)));
        head
    }

    #[track_caller]
    fn go(head: &mut Head, step: Option<Step>, left: u32) -> u32 {
        let step = step.expect("there is a way");
        moved(head, &step, Some(id(left)));
        numbers(&[step.target])[0]
    }

    #[test]
    fn undo_goes_back_one_by_one_and_redo_returns_one_by_one() {
        let mut head = head(&[1, 2, 3]);
        let step = undo(&head, 1);
        assert_eq!(go(&mut head, step, 10), 3);
        let step = undo(&head, 1);
        assert_eq!(go(&mut head, step, 11), 2);
        let step = redo(&head);
        assert_eq!(go(&mut head, step, 12), 11);
        let step = redo(&head);
        assert_eq!(go(&mut head, step, 13), 10);
        assert_eq!(redo(&head), None);
        assert_eq!(numbers(&head.past), [1, 12, 13]);
    }

    #[test]
    fn many_steps_back_can_be_redone_one_by_one() {
        let mut head = head(&[1, 2, 3]);
        let step = undo(&head, 3);
        assert_eq!(go(&mut head, step, 10), 1);
        assert_eq!(numbers(&head.future), [10, 3, 2]);
        assert_eq!(undo(&head, 1), None);
    }

    #[test]
    fn a_revert_is_undone_by_undo() {
        let mut head = head(&[1, 2]);
        let step = Some(revert(id(1)));
        go(&mut head, step, 10);
        let step = undo(&head, 1);
        assert_eq!(go(&mut head, step, 11), 10);
    }

    #[test]
    fn new_work_empties_the_future() {
        let mut head = head(&[1, 2]);
        let step = undo(&head, 1);
        go(&mut head, step, 10);
        taken(&mut head, id(4));
        assert_eq!(redo(&head), None);
        assert_eq!(numbers(&head.past), [1, 4]);
    }

    #[test]
    fn an_undo_of_work_after_an_undo_returns_to_its_start() {
        let mut head = head(&[1, 2, 3]);
        assert!(
            !going_on(&mut head),
            "the newest state is the last of the past already"
        );
        let step = undo(&head, 2);
        assert_eq!(go(&mut head, step, 10), 2);
        assert!(going_on(&mut head));
        assert_eq!((numbers(&head.past), redo(&head)), (vec![1, 2], None));
        assert!(!going_on(&mut head));
    }

    #[test]
    fn a_removed_state_is_on_neither_stack() {
        let mut head = head(&[1, 2, 3]);
        forget(&mut head, &id(2));
        assert_eq!(undo(&head, 2).unwrap().target, id(1));
        assert_eq!(undo(&head, 3), None);
        assert_eq!(undo(&head, 0), None);
    }
}
