//! The queue of a plan's steps that may be able to go on.

use std::collections::VecDeque;

/// Steps that may be able to go on, as something that they wait for may have come. A step is listed at most once.
#[derive(Default)]
pub(super) struct ReadyList {
    list: VecDeque<u32>,
    listed: Vec<bool>,
}

impl ReadyList {
    /// Lists the steps `0..steps`, in this order, and no others.
    pub(super) fn reset(&mut self, steps: usize) {
        self.list.clear();
        self.list.extend(0..steps as u32);
        self.listed.clear();
        self.listed.resize(steps, true);
    }

    pub(super) fn mark(&mut self, i: u32) {
        if !std::mem::replace(&mut self.listed[i as usize], true) {
            self.list.push_back(i);
        }
    }

    pub(super) fn next(&mut self) -> Option<usize> {
        let i = self.list.pop_front()? as usize;
        self.listed[i] = false;
        Some(i)
    }

    /// Whether every step is listed.
    pub(super) fn has_all(&self) -> bool {
        self.list.len() == self.listed.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_listed_once_until_it_was_looked_at() {
        let mut ready = ReadyList::default();
        ready.reset(2);
        ready.mark(1);
        assert_eq!([ready.next(), ready.next(), ready.next()], [Some(0), Some(1), None]);
        ready.mark(1);
        ready.mark(0);
        ready.mark(1);
        assert_eq!([ready.next(), ready.next()], [Some(1), Some(0)]);
        assert!(ready.is_empty());
    }
}
