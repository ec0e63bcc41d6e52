//! Observer mode: the ledger of a device whose blocks torch's own allocator hands out.
//!
//! Called under torch's allocator lock: takes neither the GIL nor memory of the GPU. Must not know who
//! allocates. Invariant: a block that was not seen being born is ignored when it is freed.

use crate::driver::Address;
use crate::ledger::{Accounts, Clock, LiveBlock, Sample, Tag};
use crate::stacks::StackId;
use foldhash::fast::FixedState;
use hashbrown::HashMap;
use parking_lot::{Mutex, MutexGuard};

/// What is known of a watched device.
pub struct Notes {
    /// The ledger.
    pub accounts: Accounts,
    blocks: HashMap<Address, (Tag, u64), FixedState>,
    allocated: u64,
    reserved: u64,
}

/// A watched device and the lock around its notes.
pub struct Watched {
    device: i32,
    notes: Mutex<Notes>,
}

impl Watched {
    /// Nothing was seen yet.
    pub fn new(device: i32) -> Self {
        let notes = Notes {
            accounts: Accounts::new(device),
            blocks: HashMap::with_hasher(FixedState::default()),
            allocated: 0,
            reserved: 0,
        };
        Watched { device, notes: Mutex::new(notes) }
    }

    /// The device's number.
    pub fn device(&self) -> i32 {
        self.device
    }

    /// torch handed out (`size` > 0) or took back (`size` < 0) a block.
    pub fn saw(&self, at: Address, size: i64, allocated: u64, reserved: u64, stack: StackId, clock: &Clock) {
        let mut notes = self.notes.lock();
        (notes.allocated, notes.reserved) = (allocated, reserved);
        if size > 0 {
            let tag = notes.accounts.born(stack.0, size as u64, clock.now());
            // A free that was not seen (the address comes again): the block before is gone.
            if let Some((tag, size)) = notes.blocks.insert(at, (tag, size as u64)) {
                notes.accounts.died(tag, size, clock.now());
            }
        } else if let Some((tag, size)) = notes.blocks.remove(&at) {
            notes.accounts.died(tag, size, clock.now());
        }
    }

    /// CUDA handed out a block; nobody says the device's totals, so they are counted here.
    pub fn handed_out(&self, at: Address, size: u64, stack: StackId, clock: &Clock) -> Tag {
        let mut notes = self.notes.lock();
        let tag = notes.accounts.born(stack.0, size, clock.now());
        notes.blocks.insert(at, (tag, size));
        notes.allocated += size;
        notes.reserved = notes.allocated;
        tag
    }

    /// CUDA took a block back. Its address may belong to a younger block by now.
    pub fn taken_back(&self, at: Address, tag: Tag, size: u64, clock: &Clock) {
        let mut notes = self.notes.lock();
        notes.accounts.died(tag, size, clock.now());
        notes.allocated = notes.allocated.saturating_sub(size);
        notes.reserved = notes.allocated;
        if notes.blocks.get(&at).is_some_and(|(known, _)| *known == tag) {
            notes.blocks.remove(&at);
        }
    }

    /// The notes, for as long as the guard lives; `None` if the lock was not to be had in time.
    pub fn notes(&self) -> Option<MutexGuard<'_, Notes>> {
        self.notes.try_lock_for(super::served::patience())
    }
}

impl Notes {
    /// What the ledger is told about the device at a step boundary.
    pub fn sample(&self) -> Sample {
        Sample {
            allocated: self.allocated,
            reserved: self.reserved,
            active: self.allocated,
            ..Sample::default()
        }
    }

    /// The live blocks of a site.
    pub fn blocks_of(&self, site: u32) -> Vec<LiveBlock> {
        self.blocks
            .iter()
            .filter(|(_, (tag, _))| tag.site() == site)
            .map(|(&address, &(tag, size))| LiveBlock { address, size, tag })
            .collect()
    }
}
