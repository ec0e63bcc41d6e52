//! Every distinct stack once: named frames, and a tree of callers in which a stack is one node.
//!
//! Must not know how frames were captured, and is no lock: `intern` guards it. Two raw stacks that read
//! the same (a module that was loaded twice, two calls on one line) become one node, hence one stack ID.
//! Invariant: nothing is ever removed, so an ID once given stays true; memory is bounded by a number of
//! stacks, beyond which [`Tree::insert`] declines.
#![deny(unsafe_code)]

use std::hash::{BuildHasher, Hash};
use std::sync::Arc;

use foldhash::fast::FixedState;
use hashbrown::HashTable;

/// What one frame says.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    Python {
        file: Arc<str>,
        function: Arc<str>,
        line: u32,
    },
    Native {
        address: u64,
    },
    /// Outer frames that were not kept.
    Cut,
}

/// Number of a frame in the tree's table.
pub type FrameId = u32;

/// A stack is the frames from a node to the root.
#[derive(Clone, Copy)]
struct Node {
    /// The caller's node; the root is its own.
    caller: u32,
    frame: FrameId,
    /// Whether an ID was given out for this very node (it is a stack, not only part of one).
    is_stack: bool,
}

/// See the module.
pub struct Tree {
    max_stacks: usize,
    stacks: usize,
    texts: HashTable<Arc<str>>,
    text_bytes: usize,
    frames: Vec<Place>,
    frame_ids: HashTable<FrameId>,
    nodes: Vec<Node>,
    node_ids: HashTable<u32>,
}

/// Nodes allowed for each stack that is allowed. Stacks share their outer parts: 3 is usual.
const NODES_PER_STACK: usize = 16;
const STATE: FixedState = FixedState::with_seed(0x5741_4e44);

fn hash_of(value: impl Hash) -> u64 {
    STATE.hash_one(value)
}

impl Tree {
    pub const fn new(max_stacks: usize) -> Tree {
        Tree {
            max_stacks,
            stacks: 0,
            texts: HashTable::new(),
            text_bytes: 0,
            frames: Vec::new(),
            frame_ids: HashTable::new(),
            nodes: Vec::new(),
            node_ids: HashTable::new(),
        }
    }

    pub fn set_max_stacks(&mut self, max_stacks: usize) {
        self.max_stacks = max_stacks;
    }

    pub fn is_full(&self) -> bool {
        self.stacks >= self.max_stacks || self.nodes.len() >= self.max_stacks * NODES_PER_STACK
    }

    fn text(&mut self, text: &str) -> Arc<str> {
        let hash = hash_of(text);
        if let Some(known) = self.texts.find(hash, |known| **known == *text) {
            return known.clone();
        }
        let new: Arc<str> = text.into();
        self.text_bytes += text.len();
        self.texts.insert_unique(hash, new.clone(), |text| hash_of(&**text));
        new
    }

    pub fn python_frame(&mut self, file: &str, function: &str, line: u32) -> FrameId {
        let (file, function) = (self.text(file), self.text(function));
        self.frame(Place::Python { file, function, line })
    }

    pub fn frame(&mut self, place: Place) -> FrameId {
        let hash = hash_of(&place);
        let frames = &self.frames;
        if let Some(id) = self.frame_ids.find(hash, |id| frames[*id as usize] == place) {
            return *id;
        }
        let id = self.frames.len() as FrameId;
        self.frames.push(place);
        let frames = &self.frames;
        self.frame_ids.insert_unique(hash, id, |id| hash_of(&frames[*id as usize]));
        id
    }

    /// The node of these frames, outermost first; `None` when a new stack would exceed the bound. 0 is
    /// the empty stack.
    pub fn insert(&mut self, outermost_first: impl IntoIterator<Item = FrameId>) -> Option<u32> {
        if self.nodes.is_empty() {
            self.nodes.push(Node { caller: 0, frame: 0, is_stack: true });
        }
        let mut node = 0;
        for frame in outermost_first {
            let hash = hash_of((node, frame));
            let nodes = &self.nodes;
            let same = |id: &u32| (nodes[*id as usize].caller, nodes[*id as usize].frame) == (node, frame);
            node = match self.node_ids.find(hash, same) {
                Some(id) => *id,
                None if self.is_full() => return None,
                None => {
                    let id = self.nodes.len() as u32;
                    self.nodes.push(Node { caller: node, frame, is_stack: false });
                    let nodes = &self.nodes;
                    self.node_ids.insert_unique(hash, id, |id| {
                        let node = nodes[*id as usize];
                        hash_of((node.caller, node.frame))
                    });
                    id
                }
            };
        }
        if !self.nodes[node as usize].is_stack {
            if self.is_full() {
                return None;
            }
            self.nodes[node as usize].is_stack = true;
            self.stacks += 1;
        }
        Some(node)
    }

    /// The frames of a stack, innermost first; empty for a number that was never given out.
    pub fn stack(&self, id: u32) -> Vec<Place> {
        let mut places = Vec::new();
        let mut node = id;
        while node != 0 {
            let Some(Node { caller, frame, .. }) = self.nodes.get(node as usize) else { break };
            places.extend(self.frames.get(*frame as usize).cloned());
            node = *caller;
        }
        places
    }

    pub fn stacks(&self) -> usize {
        self.stacks
    }

    pub fn nodes(&self) -> usize {
        self.nodes.len()
    }

    pub fn frames(&self) -> usize {
        self.frames.len()
    }

    /// Bytes that the tree holds, estimated from its tables' sizes.
    pub fn bytes(&self) -> usize {
        self.text_bytes
            + self.texts.capacity() * (size_of::<Arc<str>>() + 17)
            + self.frames.capacity() * size_of::<Place>()
            + self.nodes.capacity() * size_of::<Node>()
            + (self.frame_ids.capacity() + self.node_ids.capacity()) * 5
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stack(tree: &mut Tree, lines: &[u32]) -> Option<u32> {
        let frames: Vec<_> = lines.iter().map(|line| tree.python_frame("a.py", "f", *line)).collect();
        tree.insert(frames)
    }

    #[test]
    fn equal_stacks_share_a_node_and_callers_are_shared() {
        let mut tree = Tree::new(100);
        let a = stack(&mut tree, &[1, 2, 3]).unwrap();
        let b = stack(&mut tree, &[1, 2, 4]).unwrap();
        assert_eq!(stack(&mut tree, &[1, 2, 3]), Some(a));
        assert_ne!(a, b);
        assert_eq!((tree.stacks(), tree.nodes(), tree.frames()), (2, 5, 4));
        let lines: Vec<_> = tree
            .stack(b)
            .into_iter()
            .map(|place| match place {
                Place::Python { line, .. } => line,
                _ => 0,
            })
            .collect();
        assert_eq!(lines, [4, 2, 1]);
        // A caller alone is a stack of its own once somebody asks for it.
        assert_ne!(stack(&mut tree, &[1, 2]), Some(b));
        assert_eq!((tree.stacks(), tree.nodes()), (3, 5));
    }

    #[test]
    fn nothing_is_the_empty_stack() {
        let mut tree = Tree::new(1);
        assert_eq!(tree.insert([]), Some(0));
        assert!(tree.stack(0).is_empty() && tree.stack(u32::MAX).is_empty());
    }

    #[test]
    fn the_bound_holds_and_known_stacks_stay_known() {
        let mut tree = Tree::new(3);
        let known: Vec<_> = (1..=3).map(|line| stack(&mut tree, &[9, line]).unwrap()).collect();
        assert_eq!(stack(&mut tree, &[9, 4]), None);
        assert_eq!(stack(&mut tree, &[8]), None);
        assert_eq!(stack(&mut tree, &[9, 2]), Some(known[1]));
        assert_eq!(tree.stacks(), 3);
    }
}
