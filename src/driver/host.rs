//! Host memory that behaves as a device, and a twin that keeps books only.
//!
//! [`HostDriver`] hands out real memory of this process: private anonymous pages that are moved between
//! addresses, so that a forked worker sees copy-on-write copies. [`BooksDriver`] hands out addresses that
//! nothing stands behind; it replays hundreds of GiB on a laptop. Both share the rules ([`books`]), the
//! software streams ([`streams`]) and the controls below: faults on request, work that completes when a
//! test says so, and a count of every call.
//!
//! It must not know the heap. Invariant: a call that returns an error has changed nothing.

mod books;
mod controls;
mod pages;
mod streams;

use std::sync::Arc;

use parking_lot::Mutex;

pub use controls::{Call, Calls};
pub use pages::{NoPages, Pages, SharedPages};

use super::{Address, Driver, DriverError, Event, Handle, MemoryInfo, Result, Stream};
use books::{Books, Content};
use controls::Faults;
use streams::Streams;

/// What a soft device is made of.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Physical memory of the device, in bytes; creating more fails with `OutOfMemory`.
    pub memory: u64,
    /// The unit of physical memory, in bytes: a power of two, a multiple of the system's page.
    pub granularity: u64,
    /// Whether reserve/create/map are there; without them only `allocate`/`deallocate` work.
    pub virtual_memory: bool,
    /// Whether one handle may be mapped at several addresses (where the memory can do that).
    pub aliases: bool,
    /// Whether the kernel is asked to back the memory with huge pages (host memory only).
    pub huge_pages: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            memory: pages::physical_memory(),
            granularity: 2 << 20,
            virtual_memory: true,
            aliases: true,
            // Measured: fresh memory comes at a quarter of the speed with them on a virtual machine.
            huge_pages: false,
        }
    }
}

/// What a soft device asks of the memory behind it. Sizes and addresses are multiples of the granularity.
pub trait Memory: Send + Sync + 'static {
    /// Whether content can be at several addresses at once.
    const ALIASES: bool;
    fn open(options: &Options) -> Self;
    fn reserve(&self, size: u64) -> Result<Address>;
    fn unreserve(&self, at: Address, size: u64) -> Result<()>;
    /// Puts zeroed memory into a reserved range.
    fn populate(&self, at: Address, size: u64) -> Result<()>;
    /// Shows the content at `from` at `at`, a reserved range, too.
    fn alias(&self, from: Address, at: Address, size: u64) -> Result<()>;
    /// Leaves a reservation at `at`; its content is elsewhere too.
    fn leave(&self, at: Address, size: u64) -> Result<()>;
    /// Moves the content at `at` out of the way and leaves a reservation; returns where it went.
    fn park(&self, at: Address, size: u64) -> Result<Address>;
    /// Moves parked content into a reserved range.
    fn unpark(&self, parked: Address, at: Address, size: u64) -> Result<()>;
    /// Drops parked content.
    fn discard(&self, parked: Address, size: u64) -> Result<()>;
    fn allocate(&self, size: u64) -> Result<Address>;
    fn deallocate(&self, at: Address, size: u64) -> Result<()>;
}

/// Host memory as a device. Clones share the device.
pub type HostDriver = SoftDriver<Pages>;
/// Host memory that can be mapped at several addresses at once, as a GPU's can, and that a forked child
/// shares: to try things out, not to serve a job. Clones share the device.
pub type AliasingDriver = SoftDriver<SharedPages>;
/// A device without memory: addresses and books only. Clones share the device.
pub type BooksDriver = SoftDriver<NoPages>;

/// A device in software over some [`Memory`].
pub struct SoftDriver<M: Memory> {
    shared: Arc<Shared<M>>,
}

struct Shared<M> {
    memory: M,
    options: Options,
    state: Mutex<State>,
}

struct State {
    books: Books,
    streams: Streams,
    calls: Calls,
    faults: Faults,
}

impl<M: Memory> Clone for SoftDriver<M> {
    fn clone(&self) -> Self {
        SoftDriver { shared: Arc::clone(&self.shared) }
    }
}

impl<M: Memory> Default for SoftDriver<M> {
    fn default() -> Self {
        Self::new(Options::default())
    }
}

impl<M: Memory> SoftDriver<M> {
    /// Opens a device of its own.
    pub fn new(options: Options) -> Self {
        let state = Mutex::new(State {
            books: Books::new(options.granularity, options.memory),
            streams: Streams::default(),
            calls: Calls::default(),
            faults: Faults::default(),
        });
        SoftDriver { shared: Arc::new(Shared { memory: M::open(&options), options, state }) }
    }

    /// Opens a device with `memory` bytes of physical memory.
    pub fn with_memory(memory: u64) -> Self {
        Self::new(Options { memory, ..Options::default() })
    }

    /// How often each driver call was made, failed ones included.
    pub fn calls(&self) -> Calls {
        self.shared.state.lock().calls
    }

    /// Makes the `nth` call from now on (1 is the next one) fail with `error`; of one kind, or of any.
    pub fn fail(&self, call: Option<Call>, nth: u64, error: DriverError) {
        self.shared.state.lock().faults.add(call, nth, error);
    }

    /// Takes all requested faults back.
    pub fn clear_faults(&self) {
        self.shared.state.lock().faults.clear();
    }

    /// Changes the physical memory of the device, in bytes; what is already created stays.
    pub fn set_memory(&self, bytes: u64) {
        self.shared.state.lock().books.memory = bytes;
    }

    /// Physical memory that is created (or allocated plainly), in bytes.
    pub fn created(&self) -> u64 {
        self.shared.state.lock().books.created
    }

    /// Physical memory that is mapped (or allocated plainly), in bytes.
    pub fn mapped(&self) -> u64 {
        self.shared.state.lock().books.mapped_bytes()
    }

    /// Address ranges that are reserved now.
    pub fn reservations(&self) -> usize {
        self.shared.state.lock().books.reservations()
    }

    /// Events that are recorded and not yet released.
    pub fn events(&self) -> usize {
        self.shared.state.lock().streams.events()
    }

    /// Whether `at` lies in mapped (or plainly allocated) memory.
    pub fn is_mapped(&self, at: Address) -> bool {
        self.shared.state.lock().books.is_mapped(at)
    }

    /// Sends one piece of work to `stream`; it is done when [`complete`](Self::complete) says so.
    pub fn submit(&self, stream: Stream) {
        self.shared.state.lock().streams.submit(stream);
    }

    /// Completes up to `n` pieces of work of `stream`, in order; stops at work that waits for another
    /// stream's event. Returns how many were completed.
    pub fn complete(&self, stream: Stream, n: u64) -> u64 {
        self.shared.state.lock().streams.complete(stream, n)
    }

    /// Work of `stream` that is not completed.
    pub fn outstanding(&self, stream: Stream) -> u64 {
        self.shared.state.lock().streams.outstanding(stream)
    }

    /// From now on `stream` is being captured.
    pub fn begin_capture(&self, stream: Stream) {
        self.shared.state.lock().streams.set_capturing(stream, true);
    }

    /// The capture of `stream` is over.
    pub fn end_capture(&self, stream: Stream) {
        self.shared.state.lock().streams.set_capturing(stream, false);
    }

    /// Calls that a real device forbids: event work on a capturing stream, a device-wide wait during a
    /// capture, mapping over a mapping and the like. A correct heap leaves it at 0.
    pub fn violations(&self) -> u64 {
        let state = self.shared.state.lock();
        state.books.violations + state.streams.violations
    }

    fn enter(&self, call: Call) -> Result<parking_lot::MutexGuard<'_, State>> {
        let mut state = self.shared.state.lock();
        state.calls.count(call);
        match state.faults.next(call) {
            Some(error) => Err(error),
            None => Ok(state),
        }
    }

    fn virtual_memory(&self) -> Result<()> {
        if self.shared.options.virtual_memory {
            Ok(())
        } else {
            Err(DriverError::Unsupported("virtual memory management"))
        }
    }
}

impl<M: Memory> Driver for SoftDriver<M> {
    fn has_virtual_memory(&self) -> bool {
        self.shared.options.virtual_memory
    }

    fn granularity(&self) -> u64 {
        self.shared.options.granularity
    }

    fn has_aliases(&self) -> bool {
        self.shared.options.aliases && M::ALIASES
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        let state = self.enter(Call::MemoryInfo)?;
        Ok(MemoryInfo {
            free: state.books.memory.saturating_sub(state.books.created),
            total: state.books.memory,
        })
    }

    fn reserve(&self, size: u64) -> Result<Address> {
        self.virtual_memory()?;
        let mut state = self.enter(Call::Reserve)?;
        state.books.whole(size, "reserve")?;
        let at = self.shared.memory.reserve(size)?;
        state.books.reserve(at, size);
        Ok(at)
    }

    fn unreserve(&self, at: Address, size: u64) -> Result<()> {
        let mut state = self.enter(Call::Unreserve)?;
        state.books.may_unreserve(at, size)?;
        self.shared.memory.unreserve(at, size)?;
        state.books.unreserve(at);
        Ok(())
    }

    fn create(&self, size: u64) -> Result<Handle> {
        self.virtual_memory()?;
        let mut state = self.enter(Call::Create)?;
        state.books.whole(size, "create")?;
        state.books.create(size)
    }

    fn destroy(&self, handle: Handle) -> Result<()> {
        let mut state = self.enter(Call::Destroy)?;
        if let Some((parked, size)) = state.books.may_destroy(handle)? {
            self.shared.memory.discard(parked, size)?;
        }
        state.books.destroy(handle);
        Ok(())
    }

    fn map(&self, at: Address, size: u64, handle: Handle) -> Result<()> {
        let mut state = self.enter(Call::Map)?;
        match state.books.may_map(at, size, handle, self.has_aliases())? {
            Content::Parked(parked) => self.shared.memory.unpark(parked, at, size)?,
            Content::At(other) => self.shared.memory.alias(other, at, size)?,
            Content::None => self.shared.memory.populate(at, size)?,
        }
        state.books.map(at, size, handle);
        Ok(())
    }

    fn unmap(&self, at: Address, size: u64) -> Result<()> {
        let mut state = self.enter(Call::Unmap)?;
        let parked = if state.books.may_unmap(at, size)? {
            Some(self.shared.memory.park(at, size)?)
        } else {
            self.shared.memory.leave(at, size)?;
            None
        };
        state.books.unmap(at, parked);
        Ok(())
    }

    fn allocate(&self, size: u64) -> Result<Address> {
        let mut state = self.enter(Call::Allocate)?;
        state.books.may_create(size)?;
        let at = self.shared.memory.allocate(size)?;
        state.books.allocate(at, size);
        Ok(at)
    }

    fn deallocate(&self, at: Address, size: u64) -> Result<()> {
        let mut state = self.enter(Call::Deallocate)?;
        state.books.may_deallocate(at, size)?;
        self.shared.memory.deallocate(at, size)?;
        state.books.deallocate(at);
        Ok(())
    }

    fn record_event(&self, stream: Stream) -> Result<Event> {
        self.enter(Call::RecordEvent)?.streams.record(stream)
    }

    fn record_device_event(&self, _streams: &[Stream]) -> Result<Event> {
        self.enter(Call::RecordEvent)?.streams.record_all()
    }

    fn query_event(&self, event: Event) -> Result<bool> {
        self.enter(Call::QueryEvent)?.streams.query(event)
    }

    fn wait_event(&self, event: Event) -> Result<()> {
        self.enter(Call::WaitEvent)?.streams.wait(event)
    }

    fn release_event(&self, event: Event) -> Result<()> {
        self.enter(Call::ReleaseEvent)?.streams.release(event)
    }

    fn stream_wait_event(&self, stream: Stream, event: Event) -> Result<()> {
        self.enter(Call::StreamWaitEvent)?.streams.stream_wait(stream, event)
    }

    fn synchronize_stream(&self, stream: Stream) -> Result<()> {
        self.enter(Call::SynchronizeStream)?.streams.synchronize(stream)
    }

    fn synchronize_device(&self) -> Result<()> {
        self.enter(Call::SynchronizeDevice)?.streams.synchronize_all()
    }

    fn is_capturing(&self, stream: Stream) -> Result<bool> {
        Ok(self.enter(Call::IsCapturing)?.streams.is_capturing(stream))
    }
}

#[cfg(test)]
mod tests;
