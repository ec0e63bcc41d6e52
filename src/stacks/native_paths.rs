//! Walks through native frames that a thread has made before, and how each is known again.
//!
//! Which frames a walk finds follows from the registers it begins with and from the words of the stack that it
//! reads: return addresses, and here and there a saved frame pointer. So a walk is kept as the words that it rests
//! on, in the order in which they are needed, and walks that begin alike share their beginning. When the same words
//! are met again, so are the same frames: some nanoseconds a frame instead of a search of unwind tables, of which
//! those that fit no simple rule are read anew in every walk.
//!
//! Must not know how a frame is unwound. Invariants: bounded memory; a word is read only at an address that a walk
//! from the same stack pointer has read before; what a walk rests on is found by trying, and a walk that cannot be
//! told by that is not kept.

use foldhash::fast::FixedState;
use hashbrown::HashMap;

/// Most nodes of a thread, and most stack pointers that walks began with: 1.6 MiB together.
const MOST: usize = 1 << 16;
const MOST_STARTS: usize = 1 << 12;
/// Most values of one word: what differs more often than that is not worth telling apart.
const MOST_VALUES: usize = 64;
/// What a thread may spend on walks before they are met again. Each that is met again gives one back.
const CREDIT: u32 = 1 << 12;
/// What a walk costs that was recorded in vain.
const IN_VAIN: u32 = 16;
/// A thread whose credit is spent tries again after so many walks.
const TRY_AGAIN: u32 = 64;
/// Reads of one step that are looked at; none needs more than four.
const READS: usize = 8;

const NONE: u32 = u32::MAX;
/// Addresses that no word of a stack has: the end of a walk, and the frame pointer that it began with.
const END: u64 = 0;
const FRAME_POINTER: u64 = 1;

/// One thing that walks rest on: a word of the stack, or the end of a walk with what it stands for.
struct Node {
    address: u64,
    value: u64,
    /// What comes next where the word has this value, and another value that it had at that place.
    then: u32,
    otherwise: u32,
}

/// The walks of one thread, by the stack pointer that they began with.
pub struct Paths {
    nodes: Vec<Node>,
    starts: HashMap<u64, u32, FixedState>,
    credit: u32,
    /// Walks that were not known since the credit was spent.
    unknown: u32,
}

impl Default for Paths {
    fn default() -> Paths {
        Paths { nodes: Vec::new(), starts: HashMap::default(), credit: CREDIT, unknown: 0 }
    }
}

impl Paths {
    /// Forgets all walks: the code that they went through may be another's now.
    pub fn restart(&mut self) {
        self.clear();
        self.credit = CREDIT;
    }

    fn clear(&mut self) {
        self.nodes.clear();
        self.starts.clear();
    }

    /// Whether it is worth while to record the walk that has to be made now.
    pub fn wants_another(&mut self) -> bool {
        if self.credit == 0 {
            self.unknown = (self.unknown + 1) % TRY_AGAIN;
        }
        self.credit != 0 || self.unknown == 0
    }

    /// What a walk that begins with these registers stands for, if it was kept.
    ///
    /// `read` answers for every address from `sp` to the end of the thread's stack.
    #[inline]
    pub fn find(&mut self, sp: u64, bp: u64, read: impl Fn(u64) -> u64) -> Option<u32> {
        let mut at = *self.starts.get(&sp)?;
        while let Some(node) = self.nodes.get(at as usize) {
            let met = match node.address {
                END => {
                    self.credit = (self.credit + 1).min(CREDIT);
                    return Some(node.value as u32);
                }
                FRAME_POINTER => bp,
                address => read(address),
            };
            at = if met == node.value { node.then } else { node.otherwise };
        }
        None
    }

    /// Keeps a walk that began at `sp`. Where it contradicts another, it is left out.
    pub fn keep(&mut self, sp: u64, walk: &Record, stands_for: u32) {
        let is_kept = !walk.is_unclear && self.add(sp, &walk.words, stands_for);
        self.credit = self.credit.saturating_sub(if is_kept { 1 } else { IN_VAIN });
    }

    fn add(&mut self, sp: u64, words: &[(u64, u64)], stands_for: u32) -> bool {
        let starts = self.starts.len() + usize::from(!self.starts.contains_key(&sp));
        if self.nodes.len() + words.len() + 1 > MOST || starts > MOST_STARTS {
            self.clear();
        }
        let mut from = NONE;
        for &(address, value) in words.iter().chain(&[(END, stands_for.into())]) {
            let first = match self.nodes.get(from as usize) {
                Some(node) => node.then,
                None => self.starts.get(&sp).copied().unwrap_or(NONE),
            };
            let (mut at, mut last, mut values) = (first, NONE, 0);
            while let Some(node) = self.nodes.get(at as usize) {
                if node.address != address {
                    return false;
                }
                if node.value == value {
                    break;
                }
                (last, at, values) = (at, node.otherwise, values + 1);
            }
            if at == NONE {
                if values >= if address == END { 1 } else { MOST_VALUES } {
                    return false;
                }
                at = self.nodes.len() as u32;
                self.nodes.push(Node { address, value, then: NONE, otherwise: NONE });
                if let Some(node) = self.nodes.get_mut(last as usize) {
                    node.otherwise = at;
                } else if let Some(node) = self.nodes.get_mut(from as usize) {
                    node.then = at;
                } else {
                    self.starts.insert(sp, at);
                }
            }
            from = at;
        }
        true
    }
}

/// The registers of which unwinding makes use, besides the instruction pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registers {
    pub sp: u64,
    pub bp: u64,
}

/// What a step ended with: the caller (none at the end of the stack), or a failure; and the registers then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    pub caller: Result<Option<u64>, ()>,
    pub after: Registers,
}

impl Outcome {
    /// Whether the walk goes on from here as it does from there, but for the frame pointer.
    fn leads_where(&self, other: &Outcome) -> bool {
        self.caller == other.caller && self.after.sp == other.after.sp
    }
}

/// The reads of one step.
#[derive(Default)]
pub struct Reads {
    words: [(u64, u64); READS],
    count: usize,
}

impl Reads {
    pub fn note(&mut self, address: u64, value: u64) {
        if let Some(word) = self.words.get_mut(self.count) {
            *word = (address, value);
        }
        self.count += 1;
    }
}

/// What the walk under way rests on.
pub struct Record {
    words: Vec<(u64, u64)>,
    /// Where the frame pointer's present value came from, and whether the walk is known to rest on that.
    source: u64,
    is_needed: bool,
    is_unclear: bool,
}

impl Record {
    /// An empty record with room for a walk of so many steps, so that nothing is allocated in the midst of it.
    pub fn new(steps: usize) -> Record {
        let words = Vec::with_capacity(3 * steps);
        Record { words, source: FRAME_POINTER, is_needed: false, is_unclear: false }
    }

    /// Begins anew.
    pub fn restart(&mut self) {
        self.words.clear();
        (self.source, self.is_needed, self.is_unclear) = (FRAME_POINTER, false, false);
    }

    /// Adds a step: what it began with, what it read, and what it ended with. `again` makes it again with other
    /// registers, or with the read of a number changed by [`change`].
    pub fn step(
        &mut self,
        before: Registers,
        reads: &Reads,
        outcome: Outcome,
        mut again: impl FnMut(Registers, Option<usize>) -> Outcome,
    ) {
        if reads.count > READS {
            self.is_unclear = true;
        }
        if self.is_unclear {
            return;
        }
        // What a step ends with may depend on more than is seen here.
        self.is_unclear = again(before, None) != outcome;
        let other = Registers { bp: change(before.bp), ..before };
        let without = again(other, None);
        if outcome.caller.is_err() || !without.leads_where(&outcome) {
            self.need_frame_pointer(before.bp);
        }
        let mut restored = None;
        for (number, &(address, value)) in reads.words[..reads.count].iter().enumerate() {
            if outcome.caller == Ok(Some(value)) {
                self.add(address, value); // the return address
                continue;
            }
            let changed = again(before, Some(number));
            // A failure tells nothing of what it rests on.
            let leads = outcome.caller.is_err() || !changed.leads_where(&outcome);
            if leads {
                self.add(address, value);
            }
            if changed.caller.is_ok() && changed.after.bp != outcome.after.bp {
                // Of two words, or not the word itself: seen in no unwind table.
                self.is_unclear |= restored.is_some() || outcome.after.bp != value;
                restored = Some((address, leads));
            }
        }
        match restored {
            Some((source, is_needed)) => (self.source, self.is_needed) = (source, is_needed),
            None => {
                let is_kept = outcome.after.bp == before.bp && without.after.bp == other.bp;
                self.is_unclear |= !is_kept && matches!(outcome.caller, Ok(Some(_)));
            }
        }
    }

    fn need_frame_pointer(&mut self, value: u64) {
        if !std::mem::replace(&mut self.is_needed, true) {
            self.add(self.source, value);
        }
    }

    fn add(&mut self, address: u64, value: u64) {
        if self.words.len() == self.words.capacity() {
            self.is_unclear = true;
        } else {
            self.words.push((address, value));
        }
    }
}

/// Another value, in every part of it.
pub fn change(value: u64) -> u64 {
    value ^ 0x5a5a_5a5a_5a5a_5a58
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap as Memory;

    const SP: u64 = 0x1000;

    fn record(words: &[(u64, u64)]) -> Record {
        Record { words: words.to_vec(), ..Record::new(0) }
    }

    fn find(paths: &mut Paths, bp: u64, memory: &[(u64, u64)]) -> Option<u32> {
        let memory: Memory<u64, u64> = memory.iter().copied().collect();
        paths.find(SP, bp, |address| memory.get(&address).copied().unwrap_or(0))
    }

    #[test]
    fn walks_that_begin_alike_are_told_apart() {
        let mut paths = Paths::default();
        let walks: [&[(u64, u64)]; 4] = [
            &[(0x1008, 5), (0x1020, 6)],
            &[(0x1008, 5), (0x1020, 7), (0x1100, 1)],
            &[(0x1008, 4)],
            &[(0x1008, 3), (FRAME_POINTER, 9), (0x2000, 2)],
        ];
        for (walk, id) in walks.iter().zip(10..) {
            paths.keep(SP, &record(walk), id);
        }
        assert_eq!(find(&mut paths, 0, walks[0]), Some(10));
        assert_eq!(find(&mut paths, 0, walks[1]), Some(11));
        assert_eq!(find(&mut paths, 0, walks[2]), Some(12));
        assert_eq!(find(&mut paths, 9, walks[3]), Some(13));
        assert_eq!(find(&mut paths, 8, walks[3]), None, "another frame pointer");
        assert_eq!(find(&mut paths, 0, &[(0x1008, 5), (0x1020, 8)]), None);
        assert_eq!(paths.find(SP + 8, 0, |_| 5), None, "another stack pointer");
        paths.restart();
        assert_eq!(find(&mut paths, 0, walks[0]), None);
    }

    #[test]
    fn a_walk_that_contradicts_another_is_not_kept() {
        let mut paths = Paths::default();
        paths.keep(SP, &record(&[(0x1008, 5), (0x1020, 6)]), 1);
        paths.keep(SP, &record(&[(0x1008, 5), (0x1028, 6)]), 2);
        assert_eq!(find(&mut paths, 0, &[(0x1008, 5), (0x1028, 6)]), None);
        assert_eq!(find(&mut paths, 0, &[(0x1008, 5), (0x1020, 6)]), Some(1));
    }

    #[test]
    fn memory_and_the_patience_for_what_never_comes_back_are_bounded() {
        let mut paths = Paths::default();
        let walk: Vec<_> = (0..100).map(|n| (0x1008 + 8 * n, n)).collect();
        for id in 0..CREDIT {
            assert!(paths.wants_another());
            paths.keep(SP + 8 * u64::from(id), &record(&walk), id);
            assert!(paths.nodes.len() <= MOST);
        }
        let tries = (0..10 * TRY_AGAIN).filter(|_| paths.wants_another()).count();
        assert_eq!(tries, 10, "none was met again");
        let newest = SP + 8 * u64::from(CREDIT - 1);
        assert_eq!(paths.find(newest, 0, |address| (address - 0x1008) / 8), Some(CREDIT - 1));
        assert!(paths.wants_another());
        for sp in 0..2 * MOST_STARTS as u64 {
            paths.keep(sp, &record(&[]), 1);
            assert!(paths.starts.len() <= MOST_STARTS);
        }
    }

    #[test]
    fn a_word_that_is_never_the_same_twice_is_given_up() {
        let mut paths = Paths::default();
        for value in 0..1000 {
            paths.keep(SP, &record(&[(0x1008, 5), (0x1010, value)]), 1);
        }
        assert!(paths.nodes.len() <= 2 * MOST_VALUES + 1);
        assert!(!paths.wants_another(), "walks that cannot be kept cost more");
        paths.restart();
        assert!(paths.wants_another());
    }

    /// A frame as unwind tables describe it: by which register its caller is found, and what it saves.
    #[derive(Clone, Copy)]
    enum Rule {
        /// (words to the caller's frame, word that holds the frame pointer)
        Sp(u64, Option<u64>),
        Bp,
        /// The caller's frame is where this word says.
        Word(u64),
    }

    /// One step of a machine whose frames have these rules, by the return address.
    fn unwind(
        rules: &Memory<u64, Rule>,
        ip: u64,
        from: Registers,
        see: &mut dyn FnMut(u64) -> Option<u64>,
    ) -> Outcome {
        let failed = Outcome { caller: Err(()), after: from };
        let Some(&rule) = rules.get(&ip) else { return Outcome { caller: Ok(None), after: from } };
        let mut steps = || {
            let (end, bp) = match rule {
                Rule::Sp(words, None) => (from.sp + 8 * words, from.bp),
                Rule::Sp(words, Some(saved)) => (from.sp + 8 * words, see(from.sp + 8 * saved)?),
                Rule::Bp => (from.bp.checked_add(16)?, see(from.bp)?),
                Rule::Word(word) => (see(from.sp + 8 * word)?, from.bp),
            };
            let caller = see(end.checked_sub(8)?)?;
            Some(Outcome { caller: Ok(Some(caller)), after: Registers { sp: end, bp } })
        };
        steps().unwrap_or(failed)
    }

    /// Walks and records; the return addresses.
    fn walk(
        rules: &Memory<u64, Rule>,
        memory: &Memory<u64, u64>,
        bp: u64,
        record: &mut Record,
    ) -> (Vec<u64>, Registers) {
        let (mut ip, mut registers, mut frames) = (1, Registers { sp: SP, bp }, Vec::new());
        record.restart();
        loop {
            let mut reads = Reads::default();
            let outcome = unwind(rules, ip, registers, &mut |address| {
                let value = *memory.get(&address)?;
                reads.note(address, value);
                Some(value)
            });
            record.step(registers, &reads, outcome, |from, changed| {
                let mut number = 0;
                unwind(rules, ip, from, &mut |address| {
                    let value = *memory.get(&address)?;
                    number += 1;
                    Some(if changed == Some(number - 1) { change(value) } else { value })
                })
            });
            let Ok(Some(caller)) = outcome.caller else { return (frames, registers) };
            frames.push(caller);
            (ip, registers) = (caller, outcome.after);
        }
    }

    #[test]
    fn a_walk_rests_on_what_its_rules_say_and_on_nothing_else() {
        let rules: Memory<u64, Rule> = [
            (1, Rule::Sp(4, Some(2))),
            (11, Rule::Sp(2, None)),
            (12, Rule::Bp),
            (13, Rule::Word(1)),
            (14, Rule::Sp(3, Some(0))),
            (15, Rule::Sp(2, None)),
        ]
        .into();
        let words = [
            (SP + 16, SP + 64), // the frame pointer, of which 12 makes use
            (SP + 24, 11),
            (SP + 40, 12),
            (SP + 64, 0xbad), // restored by 12, used by nobody
            (SP + 72, 13),
            (SP + 88, SP + 128), // where 13 says that its caller's frame is
            (SP + 120, 14),
            (SP + 128, 0xbad), // restored by 14, used by nobody
            (SP + 144, 15),
            (SP + 160, 16),
        ];
        let memory: Memory<u64, u64> = words.into();
        let mut record = Record::new(20);
        let (frames, _) = walk(&rules, &memory, 0x77, &mut record);
        assert_eq!(frames, [11, 12, 13, 14, 15, 16]);
        assert!(!record.is_unclear);
        let mut rests_on = record.words.clone();
        rests_on.sort_unstable();
        let needed: Vec<_> = words.iter().copied().filter(|&(_, value)| value != 0xbad).collect();
        assert_eq!(rests_on, needed);
    }

    #[test]
    fn the_first_frame_pointer_counts_where_it_is_used() {
        let rules: Memory<u64, Rule> = [(1, Rule::Sp(2, None)), (11, Rule::Bp)].into();
        let memory: Memory<u64, u64> =
            [(SP + 8, 11), (SP + 32, 0), (SP + 40, 12), (SP + 64, 0), (SP + 72, 12)].into();
        let mut record = Record::new(20);
        let (frames, _) = walk(&rules, &memory, SP + 32, &mut record);
        assert_eq!(frames, [11, 12]);
        assert_eq!(record.words, [(SP + 8, 11), (FRAME_POINTER, SP + 32), (SP + 40, 12)]);
    }

    #[test]
    fn where_a_step_fails_the_frame_pointer_counts() {
        let rules: Memory<u64, Rule> = [(1, Rule::Sp(2, None)), (11, Rule::Bp)].into();
        let memory: Memory<u64, u64> = [(SP + 8, 11)].into();
        let mut record = Record::new(20);
        let (frames, _) = walk(&rules, &memory, 0x33, &mut record);
        assert_eq!(frames, [11]);
        assert_eq!(record.words, [(SP + 8, 11), (FRAME_POINTER, 0x33)]);
    }

    proptest::proptest! {
        /// Whatever the frames, a walk that is found is the walk that would be made.
        #[test]
        fn what_is_found_is_what_a_walk_finds(
            rules in proptest::collection::vec((0..4u8, 1..6u64, 0..6u64), 8),
            stacks in proptest::collection::vec((0..4u64, proptest::collection::vec(0..24u64, 40)), 1..60),
        ) {
            let rules: Memory<u64, Rule> = (1..).zip(rules).map(|(ip, (kind, words, word))| (ip, match kind {
                0 => Rule::Sp(words, None),
                1 => Rule::Sp(words, Some(word)),
                2 => Rule::Bp,
                _ => Rule::Word(word),
            })).collect();
            let mut paths = Paths::default();
            let mut known: Vec<Vec<u64>> = Vec::new();
            let mut record = Record::new(100);
            for (bp, words) in stacks.iter().chain(&stacks) {
                // Half of the words are places in the stack, the others return addresses.
                let bp = SP + 8 * bp;
                let memory: Memory<u64, u64> = (0..).zip(words).map(|(at, &word)| {
                    (SP + 8 * at, if word < 12 { word } else { SP + 8 * (at + word - 11) })
                }).collect();
                let found = paths.find(SP, bp, |address| memory.get(&address).copied().unwrap_or(u64::MAX));
                let (frames, _) = walk(&rules, &memory, bp, &mut record);
                match found {
                    Some(id) => proptest::prop_assert_eq!(&known[id as usize], &frames),
                    None => {
                        paths.keep(SP, &record, known.len() as u32);
                        known.push(frames);
                    }
                }
            }
        }
    }
}
