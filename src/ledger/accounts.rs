//! The accounts of one device: every birth and death, counted by site, step and phase.
//!
//! Must not know: addresses, frames, what a leak is. The caller holds the device's lock.
//! Invariant: counters are exact; born and died are O(1) and do not allocate once a site is known; at a
//! step boundary only sites that changed are visited; memory is bounded by [`MAX_SITES`] sites.

use super::clock::{Now, PHASE_NUMBERS, Phase};
use super::device::{Boundary, DeviceBooks, Sample};
use super::site::Site;
use super::tag::Tag;
use super::windows::Flow;
use hashbrown::HashMap;

/// Sites of one device; stacks beyond are counted together under stack 0.
pub const MAX_SITES: usize = 1 << 17;
/// Births of the running step and of two before, kept apart from what has matured.
const YOUNG: usize = 4;

#[derive(Debug)]
pub struct Accounts {
    device: i32,
    sites: Vec<Site>,
    index: HashMap<u32, u32, foldhash::fast::FixedState>,
    dirty: Vec<u32>,
    /// Sites the judge looks at.
    watched: Vec<u32>,
    serial: u64,
    /// The running step.
    step: u32,
    live_blocks: u64,
    live_bytes: u64,
    /// The highest live bytes since the last boundary.
    peak: u64,
    young: [u64; YOUNG],
    phase_live: [u64; PHASE_NUMBERS],
    phase_born: [u64; PHASE_NUMBERS],
    phase_freed: [u64; PHASE_NUMBERS],
    /// The phase in which `peak` was reached.
    peak_phase: Phase,
    blocks_born: u64,
    blocks_freed: u64,
    books: DeviceBooks,
}

impl Accounts {
    /// Accounts of device `device` (-1: the host).
    pub fn new(device: i32) -> Accounts {
        Accounts {
            device,
            sites: Vec::with_capacity(256),
            index: HashMap::with_capacity_and_hasher(256, foldhash::fast::FixedState::default()),
            dirty: Vec::with_capacity(256),
            watched: Vec::new(),
            serial: 0,
            step: 0,
            live_blocks: 0,
            live_bytes: 0,
            peak: 0,
            young: [0; YOUNG],
            phase_live: [0; PHASE_NUMBERS],
            phase_born: [0; PHASE_NUMBERS],
            phase_freed: [0; PHASE_NUMBERS],
            peak_phase: Phase::Other,
            blocks_born: 0,
            blocks_freed: 0,
            books: DeviceBooks::default(),
        }
    }

    pub fn device(&self) -> i32 {
        self.device
    }

    /// A block of `requested` bytes was handed out. The tag belongs to it until it dies.
    #[inline]
    pub fn born(&mut self, stack: u32, requested: u64, now: Now) -> Tag {
        let tag = self.expect(stack, now);
        self.enter(tag, requested);
        tag
    }

    /// The tag of a block that is about to be handed out. Nothing counts until it is [entered](Self::enter), at once
    /// or never.
    #[inline]
    pub fn expect(&mut self, stack: u32, now: Now) -> Tag {
        if now.step > self.step {
            self.turn(now.step);
        }
        let site = match self.index.get(&stack) {
            Some(site) => *site,
            None => self.open(stack),
        };
        Tag::new(site, self.serial + 1, Now { step: self.step, ..now })
    }

    /// The block of the newest expected tag was handed out, with `requested` bytes.
    #[inline]
    pub fn enter(&mut self, tag: Tag, requested: u64) {
        let (site, phase) = (tag.site(), tag.phase());
        let Some(entry) = self.sites.get_mut(site as usize) else { return };
        entry.born(self.step, requested, phase);
        if !entry.dirty {
            entry.dirty = true;
            self.dirty.push(site);
        }
        self.serial += 1;
        self.young[self.step as usize % YOUNG] += requested;
        self.handed_out(phase, requested);
    }

    /// The device has handed out a block more.
    #[inline(always)]
    fn handed_out(&mut self, phase: Phase, requested: u64) {
        self.live_blocks += 1;
        self.live_bytes += requested;
        self.blocks_born += 1;
        if self.live_bytes > self.peak {
            (self.peak, self.peak_phase) = (self.live_bytes, phase);
        }
        self.phase_live[phase.number()] += requested;
        self.phase_born[phase.number()] += requested;
    }

    /// The live bytes that were born in a step, as long as they are counted.
    #[inline(always)]
    fn young_of(&mut self, step: u32) -> Option<&mut u64> {
        let counted = self.step - step.min(self.step) < YOUNG as u32 - 1;
        counted.then(|| &mut self.young[step as usize % YOUNG])
    }

    /// The block that carried `tag` had been taken back, and was handed out again as it was: it is as old as it
    /// was, so it is no survivor of the running step.
    pub fn revived(&mut self, tag: Tag, requested: u64, now: Now) {
        if now.step > self.step {
            self.turn(now.step);
        }
        let site = tag.site();
        let Some(entry) = self.sites.get_mut(site as usize) else { return };
        entry.revived(tag.step(), requested);
        if !entry.dirty {
            entry.dirty = true;
            self.dirty.push(site);
        }
        if let Some(young) = self.young_of(tag.step()) {
            *young += requested;
        }
        self.handed_out(tag.phase(), requested);
    }

    /// The block that carried `tag` was taken back.
    #[inline]
    pub fn died(&mut self, tag: Tag, requested: u64, now: Now) {
        if now.step > self.step {
            self.turn(now.step);
        }
        let site = tag.site();
        let Some(entry) = self.sites.get_mut(site as usize) else { return };
        entry.died(tag.step(), self.step, requested, now.collecting);
        if !entry.dirty {
            entry.dirty = true;
            self.dirty.push(site);
        }
        self.live_blocks = self.live_blocks.saturating_sub(1);
        self.live_bytes = self.live_bytes.saturating_sub(requested);
        if let Some(young) = self.young_of(tag.step()) {
            *young = young.saturating_sub(requested);
        }
        self.blocks_freed += 1;
        self.phase_freed[now.phase.number()] += requested;
        let phase = &mut self.phase_live[tag.phase().number()];
        *phase = phase.saturating_sub(requested);
    }

    /// The running step becomes `step`.
    #[cold]
    fn turn(&mut self, step: u32) {
        for passed in self.step + 1..=step.min(self.step.saturating_add(YOUNG as u32)) {
            self.young[passed as usize % YOUNG] = 0;
        }
        if step - self.step > YOUNG as u32 {
            self.young = [0; YOUNG];
        }
        self.step = step;
    }

    #[cold]
    fn open(&mut self, stack: u32) -> u32 {
        if self.sites.len() >= MAX_SITES && stack != 0 {
            return match self.index.get(&0) {
                Some(site) => *site,
                None => self.open(0),
            };
        }
        let site = self.sites.len() as u32;
        self.sites.push(Site::new(stack));
        self.index.insert(stack, site);
        site
    }

    /// Step `ended` is over: files what changed in it. `sample` is what the allocator says of the device.
    pub fn boundary(&mut self, ended: u32, epoch: u32, sample: &Sample) {
        let (mut active, mut trending, mut multiplying, mut inputs, mut larger) = (0, 0, 0, 0, 0);
        // Of the sites that an input makes larger: those that usually allocate, those that did so more than usual.
        let (mut usual, mut beyond) = (0, 0);
        let mut most: (f32, Option<u32>) = (0.0, None);
        for at in 0..self.dirty.len() {
            let number = self.dirty[at];
            let site = &mut self.sites[number as usize];
            site.dirty = false;
            if let Some(done) = site.at_boundary(ended) {
                active += 1;
                trending += u32::from(site.trends_up());
                multiplying += u32::from(site.multiplies());
                if done.beyond > most.0 {
                    most = (done.beyond, Some(site.stack));
                }
                let made_by_training = matches!(site.phase, Phase::Backward | Phase::Optimizer);
                usual += u32::from(!made_by_training && done.usual);
                beyond += u32::from(!made_by_training && done.larger);
                inputs += u32::from(!made_by_training);
                larger += u32::from(site.trends_up() && !made_by_training);
            }
            if !site.watched && site.deserves_a_look(ended, self.live_bytes) {
                site.watched = true;
                self.watched.push(number);
            }
        }
        let young = self.young[ended as usize % YOUNG] + self.young[ended.wrapping_sub(1) as usize % YOUNG];
        let newer = if self.step > ended { self.young[self.step as usize % YOUNG] } else { 0 };
        let mature = self.live_bytes.saturating_sub(young + newer);
        let flow = Flow {
            step: ended,
            born: self.phase_born,
            freed: self.phase_freed,
            blocks_born: self.blocks_born,
            blocks_freed: self.blocks_freed,
        };
        let high = (self.peak, self.peak_phase);
        self.books.boundary(&Boundary {
            ended,
            epoch,
            sample,
            high,
            live: self.live_bytes,
            mature,
            active,
            trending,
            multiplying,
            by_input: beyond * 3 > usual,
            most: most.1,
            larger: larger > 0 && larger * 3 > inputs,
            flow,
        });
        self.books.credit_reserved(ended, sample.reserved, &self.sites, &self.dirty);
        self.dirty.clear();
        (self.peak, self.peak_phase) = (self.live_bytes, Phase::Other);
        if ended >= self.step {
            self.turn(ended.saturating_add(1));
        }
    }

    /// The judge has seen the watched sites: keeps those that `keep` accepts.
    pub(super) fn rewatch(&mut self, mut keep: impl FnMut(u32, &Site) -> bool) {
        let sites = &mut self.sites;
        self.watched.retain(|&number| {
            let kept = keep(number, &sites[number as usize]);
            sites[number as usize].watched = kept;
            kept
        });
    }

    pub(super) fn watched(&self) -> &[u32] {
        &self.watched
    }

    pub fn sites(&self) -> &[Site] {
        &self.sites
    }

    pub fn site(&self, number: u32) -> Option<&Site> {
        self.sites.get(number as usize)
    }

    /// The site of a stack ID.
    pub fn site_of(&self, stack: u32) -> Option<u32> {
        self.index.get(&stack).copied()
    }

    pub fn live_bytes(&self) -> u64 {
        self.live_bytes
    }

    pub fn live_blocks(&self) -> u64 {
        self.live_blocks
    }

    /// Live bytes by the phase of their birth (its number).
    pub fn phase_live(&self) -> &[u64; PHASE_NUMBERS] {
        &self.phase_live
    }

    /// Bytes ever allocated, by phase.
    pub fn phase_born(&self) -> &[u64; PHASE_NUMBERS] {
        &self.phase_born
    }

    pub fn books(&self) -> &DeviceBooks {
        &self.books
    }

    /// What the accounts take of the host's memory.
    pub fn memory_bytes(&self) -> usize {
        let spare = (self.sites.capacity() - self.sites.len()) * size_of::<Site>();
        self.sites.iter().map(Site::memory_bytes).sum::<usize>()
            + spare
            + self.index.allocation_size()
            + (self.dirty.capacity() + self.watched.capacity()) * size_of::<u32>()
            + self.books.memory_bytes()
    }

    /// Panics unless the invariants hold.
    pub fn check(&self) {
        let sum = |of: fn(&Site) -> u64| self.sites.iter().map(of).sum::<u64>();
        assert_eq!(sum(|site| site.live_blocks), self.live_blocks);
        assert_eq!(sum(|site| site.live_bytes), self.live_bytes);
        assert_eq!(self.phase_live.iter().sum::<u64>(), self.live_bytes);
        for site in &self.sites {
            site.cohorts.check(site.live_blocks, site.live_bytes);
        }
    }
}
