//! Locks of the server's maps.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A task that panicked leaves nothing half done in these maps.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
