//! Who refers to whom among Python's objects: one pass over all that the garbage collector knows, instead of
//! one pass (`gc.get_referrers`) for every level of every search.
//!
//! The Python side hands over `gc.get_objects()` and asks for the holders of one object after the other. Must
//! not know what is searched. Invariants: called with the GIL held; runs none of the user's code (only
//! `tp_traverse`, as the collector does); keeps no reference, so whoever asks must keep the list alive; where
//! this Python is not known to work so, there is no index and the Python side asks the collector.

use super::abi::guarded;
use super::python_api::{Object, function, holds_lock};
use foldhash::fast::FixedState;
use hashbrown::HashMap;
use libc::{c_int, c_uint, c_void};
use std::time::{Duration, Instant};

type Visit = unsafe extern "C" fn(Object, *mut c_void) -> c_int;
type Traverse = unsafe extern "C" fn(Object, Visit, *mut c_void) -> c_int;

/// Most references that are written down: 128 MiB of them.
const MOST: usize = 1 << 24;
/// The time is looked at whenever so many objects have been traversed.
const BETWEEN_LOOKS: u32 = 1 << 14;
/// `Py_tp_traverse` of CPython's typeslots.h, the same since 3.5.
const TRAVERSE: c_int = 71;
/// Where an object's type stands, in bytes; not so in a free-threaded Python, which is found out.
const TYPE_AT: usize = 8;

/// The functions of CPython's C API that are used here.
struct Api {
    list_size: unsafe extern "C" fn(Object) -> isize,
    list_item: unsafe extern "C" fn(Object, isize) -> Object,
    tuple_size: unsafe extern "C" fn(Object) -> isize,
    tuple_item: unsafe extern "C" fn(Object, isize) -> Object,
    type_of: unsafe extern "C" fn(Object) -> Object,
    is_subtype: unsafe extern "C" fn(Object, Object) -> c_int,
    slot: unsafe extern "C" fn(Object, c_int) -> *mut c_void,
    clear_error: unsafe extern "C" fn(),
    let_go: unsafe extern "C" fn(Object),
}

impl Api {
    fn find() -> Option<Api> {
        // SAFETY: the documented signatures, the same in every CPython from 3.9 on.
        unsafe {
            Some(Api {
                list_size: function(c"PyList_Size")?,
                list_item: function(c"PyList_GetItem")?,
                tuple_size: function(c"PyTuple_Size")?,
                tuple_item: function(c"PyTuple_GetItem")?,
                type_of: function(c"PyObject_Type")?,
                is_subtype: function(c"PyType_IsSubtype")?,
                slot: function(c"PyType_GetSlot")?,
                clear_error: function(c"PyErr_Clear")?,
                let_go: function(c"Py_DecRef")?,
            })
        }
    }

    /// Whether types stand where they are looked for.
    fn has_known_layout(&self, list: Object) -> bool {
        // SAFETY: `list` is a live object; PyObject_Type gives a new reference, given back at once.
        unsafe {
            let kind = (self.type_of)(list);
            (self.let_go)(kind);
            !kind.is_null() && type_of(list) == kind
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
unsafe fn type_of(object: Object) -> Object {
    // SAFETY: the caller's contract.
    unsafe { object.cast::<u8>().add(TYPE_AT).cast::<Object>().read() }
}

/// What is told about the objects of one type.
#[derive(Clone, Copy)]
struct Kind {
    traverse: Traverse,
    /// A bit for each class asked for that it is a subclass of.
    classes: u32,
}

/// The references among a list of objects, by the number that each has in the list.
pub struct Index {
    numbers: HashMap<usize, u32, FixedState>,
    /// Where the holders of each object begin in `holders`; one more than there are objects.
    starts: Vec<u32>,
    holders: Vec<u32>,
    /// The objects of each class asked for.
    instances: Vec<Vec<u32>>,
}

/// What a traversal writes down: (who is held, by whom).
struct Walk<'a> {
    numbers: &'a HashMap<usize, u32, FixedState>,
    holder: u32,
    references: Vec<(u32, u32)>,
}

unsafe extern "C" fn visit(object: Object, walk: *mut c_void) -> c_int {
    // SAFETY: `Index::build` passes its own Walk, which nobody else uses meanwhile.
    let walk = unsafe { &mut *walk.cast::<Walk<'_>>() };
    if let Some(&number) = walk.numbers.get(&(object as usize)) {
        if walk.references.len() == walk.references.capacity()
            && (walk.references.len() >= MOST || walk.references.try_reserve(1 << 18).is_err())
        {
            return 1;
        }
        walk.references.push((number, walk.holder));
    }
    0
}

impl Index {
    /// None as well where it would take too long, or more memory than there is.
    ///
    /// # Safety
    /// The GIL is held; `objects` is a list and `classes` a tuple of types.
    unsafe fn build(objects: Object, classes: Object, patience: Duration) -> Option<Index> {
        let until = Instant::now() + patience;
        let api = Api::find()?;
        if !holds_lock() || !api.has_known_layout(objects) {
            return None;
        }
        // SAFETY: the caller's contract; both answer -1 and set an error for anything else.
        let (count, of_interest) = unsafe { ((api.list_size)(objects), (api.tuple_size)(classes)) };
        let (Ok(count), Ok(of_interest)) = (u32::try_from(count), usize::try_from(of_interest)) else {
            // SAFETY: the GIL is held.
            unsafe { (api.clear_error)() };
            return None;
        };
        let mut items: Vec<Object> = with_room(count as usize)?;
        // SAFETY: indices within the size just read; the list keeps its items alive and the GIL keeps it
        // from changing.
        items.extend((0..count as isize).map(|at| unsafe { (api.list_item)(objects, at) }));
        // SAFETY: as above.
        let classes: Vec<Object> =
            (0..of_interest.min(32) as isize).map(|at| unsafe { (api.tuple_item)(classes, at) }).collect();
        let mut numbers = HashMap::with_hasher(FixedState::default());
        numbers.try_reserve(items.len()).ok()?;
        numbers.extend(items.iter().zip(0..).map(|(&item, number)| (item as usize, number)));

        let mut kinds: HashMap<usize, Kind, FixedState> = HashMap::default();
        let mut instances: Vec<Vec<u32>> = vec![Vec::new(); classes.len()];
        let mut walk = Walk { numbers: &numbers, holder: 0, references: Vec::new() };
        for (&item, number) in items.iter().zip(0..) {
            // SAFETY: the item is alive and its layout is known.
            let class = unsafe { type_of(item) };
            let kind = match kinds.get(&(class as usize)) {
                Some(&kind) => kind,
                None => {
                    let traverse = api.traverse(class)?;
                    let bit = |(bit, &of): (usize, &Object)| {
                        // SAFETY: both are types.
                        u32::from(unsafe { (api.is_subtype)(class, of) } != 0) << bit
                    };
                    let kind = Kind { traverse, classes: classes.iter().enumerate().map(bit).sum() };
                    kinds.insert(class as usize, kind);
                    kind
                }
            };
            for (bit, of_class) in instances.iter_mut().enumerate() {
                if kind.classes >> bit & 1 != 0 {
                    push(of_class, number)?;
                }
            }
            if number % BETWEEN_LOOKS == 0 && Instant::now() > until {
                return None;
            }
            walk.holder = number;
            // SAFETY: what the collector does at every collection; `visit` touches no object.
            if unsafe { (kind.traverse)(item, visit, (&raw mut walk).cast()) } != 0 {
                return None;
            }
        }
        let references = walk.references;
        let (starts, holders) = sorted(items.len(), &references)?;
        Some(Index { numbers, starts, holders, instances })
    }

    /// The numbers of the objects that refer to the one at an address; none if it is not known.
    fn holders_of(&self, address: usize) -> Option<&[u32]> {
        let number = *self.numbers.get(&address)? as usize;
        self.holders.get(self.starts[number] as usize..self.starts[number + 1] as usize)
    }
}

/// An empty vector with room for `count`, if there is the memory.
fn with_room<T>(count: usize) -> Option<Vec<T>> {
    let mut made = Vec::new();
    made.try_reserve_exact(count).ok()?;
    Some(made)
}

fn push(numbers: &mut Vec<u32>, number: u32) -> Option<()> {
    if numbers.len() == numbers.capacity() {
        numbers.try_reserve(numbers.len().max(64)).ok()?;
    }
    numbers.push(number);
    Some(())
}

/// Sorts pairs (held, holder) by who is held: where each one's holders begin, and the holders. None if there
/// is no memory for that.
fn sorted(objects: usize, references: &[(u32, u32)]) -> Option<(Vec<u32>, Vec<u32>)> {
    let mut starts: Vec<u32> = with_room(objects + 1)?;
    starts.resize(objects + 1, 0);
    for &(held, _) in references {
        starts[held as usize + 1] += 1;
    }
    for at in 0..objects {
        starts[at + 1] += starts[at];
    }
    let mut next: Vec<u32> = with_room(objects + 1)?;
    next.extend_from_slice(&starts);
    let mut holders: Vec<u32> = with_room(references.len())?;
    holders.resize(references.len(), 0);
    for &(held, holder) in references {
        let at = &mut next[held as usize];
        holders[*at as usize] = holder;
        *at += 1;
    }
    Some((starts, holders))
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

/// For the Python side. Null where there can be no index, or none within so many milliseconds.
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
    fn holders_are_sorted_by_who_is_held() {
        let (starts, holders) = sorted(4, &[(2, 0), (0, 3), (2, 1), (2, 3)]).unwrap();
        assert_eq!(starts, [0, 1, 1, 4, 4]);
        assert_eq!(holders, [3, 0, 1, 3]);
        assert_eq!(sorted(0, &[]), Some((vec![0], vec![])));
    }

    #[test]
    fn more_than_there_is_room_for_is_no_index() {
        assert!(with_room::<u64>(usize::MAX / 16).is_none());
    }

    #[test]
    fn without_python_there_is_no_index() {
        // SAFETY: neither argument is looked at where there is no Python.
        let index = unsafe { strandline_internal_index(std::ptr::null_mut(), std::ptr::null_mut(), 1000) };
        assert!(index.is_null());
    }
}
