//! References, gathered one after the other, turned around: who refers to each of a set of addresses.
//!
//! Must not know what lies at the addresses, nor Python. Invariants: an allocation that fails is no result; while there
//! is room, a reference is added without one.

use super::addresses::Addresses;

/// Most references that are kept: 64 MiB of them, twice.
const MOST: usize = 1 << 24;
/// So many are looked up at once, that no look-up waits for the one before: few enough for the caches.
const GATHERED: usize = 1 << 11;

/// The address that is referred to, and the number of the holder.
type Reference = (usize, u32);

/// Who refers to whom, sorted by who is referred to.
#[derive(Debug, PartialEq)]
pub(super) struct Turned {
    /// Where the holders of each begin in `holders`; at least one more than there are addresses.
    starts: Vec<u32>,
    holders: Vec<u32>,
}

impl Turned {
    /// The holders of the address of this number, in the order in which they were gathered.
    pub(super) fn of(&self, number: u32) -> &[u32] {
        let number = number as usize;
        let ends = self.starts.get(number).zip(self.starts.get(number + 1));
        ends.and_then(|(&start, &end)| self.holders.get(start as usize..end as usize)).unwrap_or(&[])
    }
}

/// Takes references, holder by holder in the order of their numbers.
pub(super) struct Gatherer<'a> {
    known: &'a Addresses,
    batch: Vec<Reference>,
    /// The numbers of what is held, of one holder after the other.
    held: Vec<u32>,
    /// Where in `held` that of each holder ends; 0 where it holds nothing.
    ends: Vec<u32>,
}

impl Gatherer<'_> {
    /// For holders whose numbers are less than `holders`. None if there is no memory for them.
    pub(super) fn new(known: &Addresses, holders: usize) -> Option<Gatherer<'_>> {
        let mut ends: Vec<u32> = with_room(holders)?;
        ends.resize(holders, 0);
        Some(Gatherer { known, batch: with_room(GATHERED)?, held: Vec::new(), ends })
    }

    /// Whether there was room for it.
    #[inline(always)]
    pub(super) fn add(&mut self, address: usize, holder: u32) -> bool {
        if self.batch.len() >= GATHERED && self.look_up().is_none() {
            return false;
        }
        self.batch.push((address, holder));
        true
    }

    /// Looks up what was gathered. None if there is no memory for that, or are too many.
    fn look_up(&mut self) -> Option<()> {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("popcnt") {
            #[target_feature(enable = "popcnt")]
            fn counting(gatherer: &mut Gatherer<'_>) -> Option<()> {
                gatherer.look_up_each()
            }
            // SAFETY: this processor has it.
            return unsafe { counting(self) };
        }
        self.look_up_each()
    }

    #[inline(always)]
    fn look_up_each(&mut self) -> Option<()> {
        let (mut count, more) = (self.held.len(), self.batch.len());
        if count + more > MOST {
            return None;
        }
        if self.held.capacity() - count < more {
            self.held.try_reserve(more.max(count).max(1 << 18)).ok()?;
        }
        self.held.resize(count + more, 0);
        for &(address, holder) in &self.batch {
            let (number, is_known) = self.known.look(address);
            self.held[count] = number;
            count += usize::from(is_known);
            // A holder of a number that was not announced holds nothing.
            if let Some(end) = self.ends.get_mut(holder as usize) {
                *end = count as u32;
            }
        }
        self.held.truncate(count);
        self.batch.clear();
        Some(())
    }

    /// None if there is no memory for that, or were too many.
    pub(super) fn turned(mut self) -> Option<Turned> {
        self.look_up()?;
        let mut starts: Vec<u32> = with_room(self.known.len() + 2)?;
        starts.resize(self.known.len() + 2, 0);
        for &number in &self.held {
            starts[number as usize + 2] += 1;
        }
        for at in 2..starts.len() {
            starts[at] += starts[at - 1];
        }
        // From here on starts[n + 1] is where the next holder of n goes: at the end, where those of n + 1 begin.
        let mut holders: Vec<u32> = with_room(self.held.len())?;
        holders.resize(self.held.len(), 0);
        let mut begin = 0;
        for (holder, &end) in (0..).zip(&self.ends) {
            let end = begin.max(end as usize);
            for &number in &self.held[begin..end] {
                let at = &mut starts[number as usize + 1];
                holders[*at as usize] = holder;
                *at += 1;
            }
            begin = end;
        }
        Some(Turned { starts, holders })
    }
}

/// An empty vector with room for `count`, if there is the memory.
pub(super) fn with_room<T>(count: usize) -> Option<Vec<T>> {
    let mut made = Vec::new();
    made.try_reserve_exact(count).ok()?;
    Some(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(count: usize) -> Addresses {
        Addresses::new((1..=count).map(|n| n << 4)).unwrap()
    }

    fn turned(known: &Addresses, references: &[Reference]) -> Option<Turned> {
        let mut gatherer = Gatherer::new(known, known.len()).unwrap();
        references
            .iter()
            .all(|&(address, holder)| gatherer.add(address, holder))
            .then(|| gatherer.turned())?
    }

    #[test]
    fn holders_are_sorted_by_who_is_held() {
        let set = known(4);
        let turned = turned(&set, &[(48, 0), (8, 0), (48, 1), (1 << 50, 2), (16, 3), (48, 3)]).unwrap();
        let of = |address| turned.of(set.number(address).unwrap());
        assert_eq!((of(16), of(32), of(48), of(64)), (&[3][..], &[][..], &[0, 1, 3][..], &[][..]));
        assert!(turned.of(4).is_empty() && turned.of(u32::MAX).is_empty());
    }

    #[test]
    fn nothing_holds_nothing() {
        let set = known(0);
        assert!(turned(&set, &[]).unwrap().of(0).is_empty());
    }

    #[test]
    fn many_are_as_right_as_few() {
        let count = 3_000;
        let mut state = 1_u64;
        let mut random = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        let mut references = Vec::new();
        for holder in 0..count as u32 {
            for _ in 0..random(20) {
                references.push((random(2 * count) << 4, holder));
            }
        }
        assert!(references.len() > 4 * GATHERED);
        let set = known(count);
        let turned = turned(&set, &references).unwrap();
        for address in (1..=count).map(|n| n << 4) {
            let told = turned.of(set.number(address).unwrap());
            assert!(references.iter().filter(|held| held.0 == address).map(|held| &held.1).eq(told));
        }
    }

    #[test]
    fn too_many_are_none() {
        let set = known(1);
        let mut gatherer = Gatherer::new(&set, 1).unwrap();
        assert!((0..MOST).all(|_| gatherer.add(16, 0)));
        assert!(!(0..2 * GATHERED).all(|_| gatherer.add(16, 0)));
    }

    #[test]
    fn more_than_there_is_room_for_is_none() {
        assert!(with_room::<u64>(usize::MAX / 16).is_none());
    }
}
