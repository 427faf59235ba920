//! Memory for the matrices of captured steps, which may not allocate.
//!
//! A step that runs on an arena returns the memory of each matrix when the matrix is dropped. A second run of the same
//! step then finds all that it needs, because memory is found by type and exact size. All work is on one stream, so
//! memory may be used again as soon as its last use is enqueued.

use std::{
    any::{Any, TypeId},
    cell::RefCell,
    collections::HashMap,
    ops::{Deref, DerefMut},
    rc::Rc,
};

use aril::cuda::Buffer;

/// The memory that no matrix has. Clones are the same arena.
#[derive(Clone, Debug, Default)]
pub(crate) struct Arena {
    free: Rc<RefCell<Free>>,
}

/// Buffers by their type and number of elements.
type Free = HashMap<(TypeId, usize), Vec<Box<dyn Any>>>;

impl Arena {
    /// Takes memory of exactly `len` elements, if there is some.
    pub(super) fn take<V: 'static>(&self, len: usize) -> Option<Memory<V>> {
        let buffer = self.free.borrow_mut().get_mut(&(TypeId::of::<V>(), len))?.pop()?;
        let buffer = buffer.downcast::<Buffer<V>>().ok()?;
        Some(self.own(*buffer, len))
    }

    /// Makes a buffer of `len` elements memory of the arena.
    pub(super) fn own<V: 'static>(&self, buffer: Buffer<V>, len: usize) -> Memory<V> {
        Memory { buffer: Some(buffer), home: Some((self.clone(), len)) }
    }

    fn give_back<V: 'static>(&self, buffer: Buffer<V>, len: usize) {
        self.free.borrow_mut().entry((TypeId::of::<V>(), len)).or_default().push(Box::new(buffer));
    }
}

/// The memory of a matrix: its own, or an arena's.
#[derive(Debug)]
pub(crate) struct Memory<V: 'static> {
    /// Present until it is dropped.
    buffer: Option<Buffer<V>>,
    /// The arena, and the number of elements.
    home: Option<(Arena, usize)>,
}

impl<V> From<Buffer<V>> for Memory<V> {
    fn from(buffer: Buffer<V>) -> Self {
        Self { buffer: Some(buffer), home: None }
    }
}

impl<V> Deref for Memory<V> {
    type Target = Buffer<V>;

    fn deref(&self) -> &Buffer<V> {
        self.buffer.as_ref().expect("memory has a buffer until it is dropped")
    }
}

impl<V> DerefMut for Memory<V> {
    fn deref_mut(&mut self) -> &mut Buffer<V> {
        self.buffer.as_mut().expect("memory has a buffer until it is dropped")
    }
}

impl<V> Drop for Memory<V> {
    fn drop(&mut self) {
        if let (Some((arena, len)), Some(buffer)) = (&self.home, self.buffer.take()) {
            arena.give_back(buffer, *len);
        }
    }
}
