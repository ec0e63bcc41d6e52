//! Who refers to whom among Python's objects: one pass over all that the garbage collector knows, instead of
//! one pass (`gc.get_referrers`) for every level of every search.
//!
//! The Python side hands over `gc.get_objects()` and asks for the holders of one object after the other. Must
//! not know what is searched. Invariants: called with the GIL held; runs none of the user's code (only
//! `tp_traverse`, as the collector does); keeps no reference, so whoever asks must keep the list alive; where
//! this Python is not known to work so, there is no index and the Python side asks the collector.

use super::abi::guarded;
use super::addresses::Addresses;
use super::python_api::{Object, function, holds_lock};
use super::python_boot::symbol;
use super::references::{Gatherer, Turned};
use foldhash::fast::FixedState;
use hashbrown::HashMap;
use libc::{c_int, c_uint, c_void};
use std::time::Duration;

pub(super) type Visit = unsafe extern "C" fn(Object, *mut c_void) -> c_int;
pub(super) type Traverse = unsafe extern "C" fn(Object, Visit, *mut c_void) -> c_int;

/// So many objects are traversed between the moment when what one holds is asked for from memory and its own turn; and
/// as many before that, the object itself is.
const AHEAD: usize = 8;
/// Types at the front.
const FRONT: usize = 128;
/// The time is looked at whenever so many objects have been traversed.
const BETWEEN_LOOKS: u32 = 1 << 14;
/// `Py_tp_traverse` of CPython's typeslots.h, the same since 3.5.
const TRAVERSE: c_int = 71;
/// Where an object's type stands, in bytes; not so in a free-threaded Python, which is found out.
const TYPE_AT: usize = 8;
/// Where in a list its size stands, and where its items: the place that `PyList_GET_ITEM` has compiled into every
/// extension module, the same from 3.9 to 3.14.
const SIZE_AT: usize = 16;
const ITEMS_AT: usize = 24;
/// Where in a dict the address of its keys stands, in all these versions. Nothing but speed depends on it.
const KEYS_AT: usize = 32;

/// The functions of CPython's C API that are used here.
pub(super) struct Api {
    list_size: unsafe extern "C" fn(Object) -> isize,
    tuple_size: unsafe extern "C" fn(Object) -> isize,
    tuple_item: unsafe extern "C" fn(Object, isize) -> Object,
    type_of: unsafe extern "C" fn(Object) -> Object,
    is_subtype: unsafe extern "C" fn(Object, Object) -> c_int,
    slot: unsafe extern "C" fn(Object, c_int) -> *mut c_void,
    clear_error: unsafe extern "C" fn(),
    let_go: unsafe extern "C" fn(Object),
    /// The types themselves; null if they are not found.
    list: Object,
    dict: Object,
}

impl Api {
    pub(super) fn find() -> Option<Api> {
        // SAFETY: the documented signatures, the same in every CPython from 3.9 on.
        unsafe {
            Some(Api {
                list_size: function(c"PyList_Size")?,
                tuple_size: function(c"PyTuple_Size")?,
                tuple_item: function(c"PyTuple_GetItem")?,
                type_of: function(c"PyObject_Type")?,
                is_subtype: function(c"PyType_IsSubtype")?,
                slot: function(c"PyType_GetSlot")?,
                clear_error: function(c"PyErr_Clear")?,
                let_go: function(c"Py_DecRef")?,
                list: symbol(c"PyList_Type").unwrap_or_default(),
                dict: symbol(c"PyDict_Type").unwrap_or_default(),
            })
        }
    }

    /// Whether types stand where they are looked for.
    pub(super) fn has_known_layout(&self, object: Object) -> bool {
        // SAFETY: `object` is alive; PyObject_Type gives a new reference, given back at once.
        unsafe {
            let kind = (self.type_of)(object);
            (self.let_go)(kind);
            !kind.is_null() && type_of(object) == kind
        }
    }

    /// The items of a list; none if it is no list, or its size does not stand where it is looked for.
    ///
    /// # Safety
    /// The GIL is held, and the list stays as it is as long as the items are used; `has_known_layout` said yes.
    pub(super) unsafe fn items<'a>(&self, list: Object) -> Option<&'a [Object]> {
        // SAFETY: the caller's contract; a list has room for all three words, and PyList_Size says -1 and sets an
        // error for what is none. An empty list has no items to point to.
        unsafe {
            let size = (self.list_size)(list);
            let Ok(count) = usize::try_from(size) else {
                (self.clear_error)();
                return None;
            };
            if word(list, SIZE_AT) != count {
                return None;
            }
            let items = word(list, ITEMS_AT) as *const Object;
            Some(if count == 0 { &[] } else { std::slice::from_raw_parts(items, count) })
        }
    }

    /// Gives a reference back. The GIL is held.
    pub(super) fn let_go(&self, object: Object) {
        // SAFETY: whoever calls has a reference to give back.
        unsafe { (self.let_go)(object) };
    }

    /// Forgets an error of Python's. The GIL is held.
    pub(super) fn clear_error(&self) {
        // SAFETY: the documented signature.
        unsafe { (self.clear_error)() };
    }

    /// The place in objects of a type at which the address of what they hold stands; 0 where they hold it themselves.
    fn holds_at(&self, kind: Object) -> usize {
        match kind {
            _ if kind.is_null() => 0,
            _ if kind == self.dict => KEYS_AT,
            _ if kind == self.list => ITEMS_AT,
            _ => 0,
        }
    }

    /// How objects of a type are traversed; none if this Python does not tell (3.9, of its own types).
    fn traverse(&self, kind: Object) -> Option<Traverse> {
        // SAFETY: `kind` is the type of a live object.
        let found = unsafe { (self.slot)(kind, TRAVERSE) };
        if found.is_null() {
            // SAFETY: the GIL is held. There is an error only where a slot may not be asked for.
            unsafe { (self.clear_error)() };
            return None;
        }
        // SAFETY: the slot's type, by typeslots.h.
        Some(unsafe { std::mem::transmute::<*mut c_void, Traverse>(found) })
    }
}

/// # Safety
/// `object` is a live Python object of a layout that `has_known_layout` has seen.
pub(super) unsafe fn type_of(object: Object) -> Object {
    // SAFETY: the caller's contract.
    unsafe { object.cast::<u8>().add(TYPE_AT).cast::<Object>().read() }
}

/// # Safety
/// `object` is alive and has a word there.
unsafe fn word(object: Object, at: usize) -> usize {
    // SAFETY: the caller's contract; objects are aligned to words.
    unsafe { object.cast::<u8>().add(at).cast::<usize>().read() }
}

/// What is told about the objects of one type.
#[derive(Clone, Copy)]
pub(super) struct Kind {
    class: Object,
    pub(super) traverse: Traverse,
    /// A bit for each class asked for that it is a subclass of.
    pub(super) classes: u32,
}

/// The types met, and at the front those met last: most objects are of a few types.
pub(super) struct Kinds<'a> {
    api: &'a Api,
    classes: &'a [Object],
    all: HashMap<usize, Kind, FixedState>,
    front: [Option<Kind>; FRONT],
}

impl<'a> Kinds<'a> {
    pub(super) fn new(api: &'a Api, classes: &'a [Object]) -> Kinds<'a> {
        Kinds { api, classes, all: HashMap::default(), front: [None; FRONT] }
    }

    /// None if this Python does not tell how such objects are traversed, or there is no memory.
    #[inline]
    pub(super) fn of(&mut self, class: Object) -> Option<Kind> {
        let place = (class as usize >> 4 ^ class as usize >> 10) % FRONT;
        match self.front[place] {
            Some(kind) if kind.class == class => Some(kind),
            _ => {
                let kind = self.find(class)?;
                self.front[place] = Some(kind);
                Some(kind)
            }
        }
    }

    fn find(&mut self, class: Object) -> Option<Kind> {
        if let Some(&kind) = self.all.get(&(class as usize)) {
            return Some(kind);
        }
        let traverse = self.api.traverse(class)?;
        let bit = |(bit, &of): (usize, &Object)| {
            // SAFETY: both are types.
            u32::from(unsafe { (self.api.is_subtype)(class, of) } != 0) << bit
        };
        let kind = Kind { class, traverse, classes: self.classes.iter().enumerate().map(bit).sum() };
        self.all.try_reserve(1).ok()?;
        self.all.insert(class as usize, kind);
        Some(kind)
    }
}

/// The references among a list of objects: who holds each of them, by the number that the holder has in the list.
pub struct Index {
    /// The objects, with numbers of their own.
    held: Addresses,
    /// By those, the holders of each.
    holders: Turned,
    /// The objects of each class asked for.
    instances: Vec<Vec<u32>>,
}

/// What a traversal writes down.
struct Walk<'a> {
    gatherer: Gatherer<'a>,
    holder: u32,
}

unsafe extern "C" fn visit(object: Object, walk: *mut c_void) -> c_int {
    // SAFETY: `Index::build` passes its own Walk, which nobody else uses meanwhile.
    let walk = unsafe { &mut *walk.cast::<Walk<'_>>() };
    c_int::from(!walk.gatherer.add(object as usize, walk.holder))
}

impl Index {
    /// None as well where it would take too long, or more memory than there is.
    ///
    /// # Safety
    /// The GIL is held; `objects` is a list and `classes` a tuple of types.
    unsafe fn build(objects: Object, classes: Object, patience: Duration) -> Option<Index> {
        let until = computed() + patience;
        let api = Api::find()?;
        if !holds_lock() || !api.has_known_layout(objects) {
            return None;
        }
        // SAFETY: the caller's contract; -1 and an error for what is no tuple.
        let of_interest = unsafe { (api.tuple_size)(classes) };
        let Ok(of_interest) = usize::try_from(of_interest) else {
            // SAFETY: the GIL is held.
            unsafe { (api.clear_error)() };
            return None;
        };
        // SAFETY: the caller's contract; the list keeps its items alive and the GIL keeps it from changing.
        let items = unsafe { api.items(objects) }.filter(|items| u32::try_from(items.len()).is_ok())?;
        // SAFETY: indices within the size just read.
        let classes: Vec<Object> =
            (0..of_interest.min(32) as isize).map(|at| unsafe { (api.tuple_item)(classes, at) }).collect();
        let known = Addresses::new(items.iter().map(|&item| item as usize))?;

        let mut kinds = Kinds::new(&api, &classes);
        let mut instances: Vec<Vec<u32>> = vec![Vec::new(); classes.len()];
        let mut walk = Walk { gatherer: Gatherer::new(&known, items.len())?, holder: 0 };
        for (number, &item) in (0..).zip(items) {
            if let Some(&later) = items.get(number as usize + 2 * AHEAD) {
                soon(later as usize);
                soon(later as usize + 64);
            }
            if let Some(&next) = items.get(number as usize + AHEAD) {
                // SAFETY: the item is alive and its layout is known; those two types have a word there.
                unsafe {
                    let at = api.holds_at(type_of(next));
                    if at != 0 {
                        soon(word(next, at));
                    }
                }
            }
            // SAFETY: the item is alive and its layout is known.
            let kind = kinds.of(unsafe { type_of(item) })?;
            if kind.classes != 0 {
                for (bit, of_class) in instances.iter_mut().enumerate() {
                    if kind.classes >> bit & 1 != 0 {
                        push(of_class, number)?;
                    }
                }
            }
            if number % BETWEEN_LOOKS == 0 && computed() > until {
                return None;
            }
            walk.holder = number;
            // SAFETY: what the collector does at every collection; `visit` touches no object.
            if unsafe { (kind.traverse)(item, visit, (&raw mut walk).cast()) } != 0 {
                return None;
            }
        }
        let holders = walk.gatherer.turned()?;
        Some(Index { held: known, holders, instances })
    }

    /// The numbers of the objects that refer to the one at an address; none if it is not known.
    fn holders_of(&self, address: usize) -> Option<&[u32]> {
        Some(self.holders.of(self.held.number(address)?))
    }
}

/// For how long this thread has computed: what else the machine is busy with changes no answer.
fn computed() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a valid structure, which is left as it is where there is no such clock.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// Asks for the memory at an address that is going to be read.
#[inline]
fn soon(address: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, which reads nothing and is ignored for an address of no memory; SSE is part of the architecture.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(std::ptr::without_provenance(address));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

fn push(numbers: &mut Vec<u32>, number: u32) -> Option<()> {
    if numbers.len() == numbers.capacity() {
        numbers.try_reserve(numbers.len().max(64)).ok()?;
    }
    numbers.push(number);
    Some(())
}

/// Writes numbers down as far as there is room; how many there are.
///
/// # Safety
/// `out` has room for `room` numbers.
unsafe fn hand_over(numbers: &[u32], out: *mut c_uint, room: usize) -> usize {
    let count = numbers.len().min(room);
    if !out.is_null() {
        // SAFETY: the caller's contract.
        unsafe { std::ptr::copy_nonoverlapping(numbers.as_ptr(), out, count) };
    }
    numbers.len()
}

/// For the Python side. Null where there can be no index, or none within so many milliseconds of computing.
/// `strandline_internal_forget` gives it back.
///
/// # Safety
/// The GIL is held; `objects` is a list, which outlives the index, and `classes` a tuple of types.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strandline_internal_index(
    objects: Object,
    classes: Object,
    milliseconds: c_uint,
) -> *mut Index {
    guarded(std::ptr::null_mut(), || {
        let patience = Duration::from_millis(milliseconds.into());
        // SAFETY: the caller's contract.
        let index = unsafe { Index::build(objects, classes, patience) };
        index.map_or(std::ptr::null_mut(), |index| Box::into_raw(Box::new(index)))
    })
}

/// For the Python side: the numbers of the objects that refer to the one at `address`; returns how many there
/// are, `SIZE_MAX` if the object is not known.
///
/// # Safety
/// `index` is alive; `out` has room for `room` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strandline_internal_holders(
    index: *const Index,
    address: usize,
    out: *mut c_uint,
    room: usize,
) -> usize {
    guarded(usize::MAX, || {
        // SAFETY: the caller's contract.
        unsafe { (*index).holders_of(address).map_or(usize::MAX, |found| hand_over(found, out, room)) }
    })
}

/// For the Python side: the numbers of the instances of the class of this number; returns how many there are.
///
/// # Safety
/// As above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strandline_internal_instances(
    index: *const Index,
    class: usize,
    out: *mut c_uint,
    room: usize,
) -> usize {
    guarded(0, || {
        // SAFETY: the caller's contract.
        unsafe {
            let index = &*index;
            index.instances.get(class).map_or(0, |found| hand_over(found, out, room))
        }
    })
}

/// For the Python side: gives an index back.
///
/// # Safety
/// `index` came from `strandline_internal_index` and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strandline_internal_forget(index: *mut Index) {
    if !index.is_null() {
        // SAFETY: the caller's contract.
        guarded((), || drop(unsafe { Box::from_raw(index) }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_python_there_is_no_index() {
        // SAFETY: neither argument is looked at where there is no Python.
        let index = unsafe { strandline_internal_index(std::ptr::null_mut(), std::ptr::null_mut(), 1000) };
        assert!(index.is_null());
    }
}
