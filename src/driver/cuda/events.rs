//! A device's spare events: made once, lent again and again.
//!
//! Must not know: what an event is recorded for. Invariant: an event is either lent or in the pool, never
//! both. Events are made without timing (a timed event costs more to record) and live until the process
//! ends: destroying them while the driver shuts down gains nothing.

use parking_lot::Mutex;

use super::context::check;
use super::symbols::Symbols;
use crate::driver::{Event, Result};

/// `CU_EVENT_DISABLE_TIMING`.
const WITHOUT_TIMING: u32 = 2;
/// More spare events than this are destroyed: a burst of cross-stream frees must not pin them for ever.
const SPARE: usize = 4096;

pub struct EventPool {
    symbols: &'static Symbols,
    spare: Mutex<Vec<Event>>,
}

impl EventPool {
    pub fn new(symbols: &'static Symbols) -> EventPool {
        EventPool { symbols, spare: Mutex::new(Vec::new()) }
    }

    /// An event of the current context. The caller is in the device's context.
    pub fn take(&self) -> Result<Event> {
        if let Some(event) = self.spare.lock().pop() {
            return Ok(event);
        }
        let mut event = std::ptr::null_mut();
        // SAFETY: `event` is a place for one CUevent.
        check("cuEventCreate", unsafe { (self.symbols.event_create)(&mut event, WITHOUT_TIMING) })?;
        Ok(Event(event as u64))
    }

    /// Takes an event back.
    pub fn give(&self, event: Event) {
        let mut spare = self.spare.lock();
        if spare.len() < SPARE {
            spare.push(event);
            return;
        }
        drop(spare);
        // SAFETY: the event is live and nobody holds it any more; a failure (the driver is gone) leaves
        // nothing to do.
        unsafe { (self.symbols.event_destroy)(event.0 as _) };
    }
}
