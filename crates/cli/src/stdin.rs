//! The user's standard input.

use std::io::{self, Read};

use tokio::sync::mpsc;

/// Chunks of the input, in order. The channel closes at the end of the input.
pub type Chunks = mpsc::Receiver<io::Result<Vec<u8>>>;

/// Reads in a separate thread: a read from a terminal cannot be cancelled and must not delay the
/// exit of the program.
pub fn read() -> Chunks {
    let (sender, chunks) = mpsc::channel(4);
    std::thread::spawn(move || {
        let mut buffer = vec![0; 128 * 1024];
        loop {
            let read = match io::stdin().lock().read(&mut buffer) {
                Ok(0) => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                other => other.map(|count| buffer[..count].to_vec()),
            };
            let failed = read.is_err();
            if sender.blocking_send(read).is_err() || failed {
                return;
            }
        }
    });
    chunks
}
