//! The messages on a lease and on a keeper's socket: JSON, each message with its length before it
//! as a little-endian u32. `docs/keeper-protocol.md` is the contract, with a golden message for
//! each kind.

use std::io;

use sandtree_store::BatchId;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::cause::Cause;
use crate::config::HostConfig;
use crate::create::ForkMounts;
use crate::error::Report;
use crate::info::SandboxInfo;
use crate::order::Order;
use crate::spec::SandboxSpec;

/// Both ends must speak the same version. Within a version, messages and fields are only added.
pub const PROTOCOL: u32 = 3;

/// The features added within this version. A client that needs a feature looks for it in the hello.
pub const FEATURES: [&str; 5] = ["batch", "own", "samples", "screen", "watch"];

/// Listed in the hello of a keeper that stays when its sandbox rests, because the sandbox has an
/// owner.
const STAYS: &str = "stays";

/// The longest message, in bytes.
const LIMIT: u32 = 1 << 20;

/// The first message of both ends, on every connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub protocol: u32,
    /// The version of the program, for people.
    pub program: String,
    pub features: Vec<String>,
    /// The request that asks, for the keeper's log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
}

impl Hello {
    pub fn ours() -> Self {
        Self {
            protocol: PROTOCOL,
            program: env!("CARGO_PKG_VERSION").into(),
            features: FEATURES.map(str::to_owned).to_vec(),
            cause: None,
        }
    }

    /// The hello of a client, with the request that the running task works for.
    pub fn of_client() -> Self {
        Self {
            cause: Cause::current().map(|cause| cause.to_string()),
            ..Self::ours()
        }
    }

    /// The request that a client works for.
    pub fn cause(&self) -> Option<Cause> {
        Cause::parse(self.cause.as_deref()?)
    }

    pub fn has(&self, feature: &str) -> bool {
        self.features.iter().any(|other| other == feature)
    }

    /// The hello of a keeper whose sandbox has an owner.
    pub fn of_owned() -> Self {
        let mut hello = Self::ours();
        hello.features.push(STAYS.to_owned());
        hello
    }

    /// Whether the keeper stays when its sandbox rests.
    pub fn stays(&self) -> bool {
        self.has(STAYS)
    }
}

/// What a client wants of a connection to a keeper's socket.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Call {
    /// From the answer on, both ends speak the guest's protocol.
    Link,
    /// Every state of the sandbox from the present one on, until the connection closes.
    Watch,
    /// What the sandbox uses.
    Stats,
    /// What the guest used in the past. From the first such call on, the keeper takes samples.
    Samples,
    /// The detached commands.
    Execs,
    /// Its mounts, as their server sees them.
    Mounts,
    /// A picture of the screen: its size, then red, green and blue of each pixel.
    Picture,
    /// From the answer on, the keeper's end speaks RFB, until the machine ends.
    View,
    /// A verb. What is lent is lent for as long as the connection stays open.
    Order(Order),
}

/// The size of a picture, in pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PictureSize {
    pub width: u32,
    pub height: u32,
}

impl PictureSize {
    /// How many bytes a picture of this size has. `None`: more than a picture may have.
    pub fn bytes(self) -> Option<usize> {
        const MOST: u64 = 64 << 20;
        let bytes = u64::from(self.width)
            .checked_mul(self.height.into())?
            .checked_mul(3)?;
        (1..=MOST).contains(&bytes).then_some(bytes as usize)
    }
}

/// What a keeper is started for.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Mission {
    pub config: HostConfig,
    pub task: Task,
    /// The batch that a new sandbox belongs to.
    pub batch: Option<BatchId>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Task {
    Create(Box<SandboxSpec>),
    /// A copy of `source` from one of its states. It does not run until [`Word::Go`].
    Copy {
        source: String,
        state: String,
        name: String,
        #[serde(default)]
        mounts: ForkMounts,
    },
    /// A sandbox at rest gets a keeper, which carries an order out and stays.
    Order {
        reference: String,
        order: Order,
    },
}

impl Task {
    /// What the log calls it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Create(_) => "create",
            Self::Copy { .. } => "copy",
            Self::Order { order, .. } => order.name(),
        }
    }

    pub fn makes_a_sandbox(&self) -> bool {
        matches!(self, Self::Create(_) | Self::Copy { .. })
    }
}

/// What the holder of a lease sends: one byte, so that a reader that waits for several things
/// cannot lose half of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Word {
    /// A copy that is loaded continues.
    Go = b'g' as isize,
    /// The new sandbox belongs to the holder of the lease: the keeper stays when the sandbox rests,
    /// and removes the sandbox when the lease closes. Said before the commit.
    Own = b'o' as isize,
    /// The new sandbox exists for others; the lease is still held.
    Commit = b'c' as isize,
    /// The sandbox exists and no longer depends on the lease.
    Release = b'r' as isize,
    /// The sandbox is not wanted after all. Nothing of it is saved.
    GiveUp = b'x' as isize,
}

impl Word {
    const ALL: [Self; 5] = [
        Self::Go,
        Self::Own,
        Self::Commit,
        Self::Release,
        Self::GiveUp,
    ];

    pub fn of(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|word| word.byte() == byte)
    }

    pub fn byte(self) -> u8 {
        self as u8
    }
}

/// What a keeper reports on its lease.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum News {
    /// A copy has loaded its state, and waits for [`Word::Go`].
    Loaded,
    Ready(Box<Ready>),
    /// The sandbox exists for others.
    Committed,
    Failed(Report),
    /// The sandbox has ended, and was saved as this snapshot.
    Saved {
        digest: String,
    },
}

/// A sandbox that runs, and the answer to the order that started it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Ready {
    pub info: SandboxInfo,
    pub answer: Value,
}

/// An answer, or why there is none.
pub(crate) type Answer<T> = Result<T, Report>;

pub(crate) async fn write<T: Serialize>(
    stream: &mut (impl AsyncWrite + Unpin),
    message: &T,
) -> io::Result<()> {
    stream.write_all(&frame(message)?).await
}

/// Both messages in one write: a client's hello needs no answer before its call.
pub(crate) async fn write_both<T: Serialize>(
    stream: &mut (impl AsyncWrite + Unpin),
    hello: &Hello,
    message: &T,
) -> io::Result<()> {
    let mut bytes = frame(hello)?;
    bytes.extend(frame(message)?);
    stream.write_all(&bytes).await
}

fn frame<T: Serialize>(message: &T) -> io::Result<Vec<u8>> {
    let body = serde_json::to_vec(message)?;
    let length = u32::try_from(body.len())
        .ok()
        .filter(|length| *length <= LIMIT)
        .ok_or(io::ErrorKind::InvalidInput)?;
    let mut bytes = length.to_le_bytes().to_vec();
    bytes.extend(body);
    Ok(bytes)
}

pub(crate) async fn read<T: DeserializeOwned>(
    stream: &mut (impl AsyncRead + Unpin),
) -> io::Result<T> {
    let length = stream.read_u32_le().await?;
    if length > LIMIT {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut body = vec![0; length as usize];
    stream.read_exact(&mut body).await?;
    Ok(serde_json::from_slice(&body)?)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fmt::Debug;

    use sandtree_store::{Consistency, MountAccess};
    use serde_json::json;

    use super::*;
    use crate::degradation::Degradation;
    use crate::error::Error;
    use crate::mounts::{InUse, MountSpec};
    use crate::order::{Applied, LentState, Unmount, Wanted};
    use crate::order::{GiveBack, Kill, Pause, Remove, Resume, Start, Stop, TakeCheckpoint};
    use crate::states::{Forget, Goal, Replace};
    use crate::status::State;
    use crate::verb::{Phase, Verb};

    /// The messages that `docs/keeper-protocol.md` promises, by name.
    const GOLDEN: &str = include_str!("../../../../docs/vectors/keeper-protocol.jsonl");

    fn golden() -> BTreeMap<String, Value> {
        let lines = GOLDEN.lines().map(|line| {
            let line: Value = serde_json::from_str(line).expect("a line is JSON");
            let name = line["name"].as_str().expect("a line has a name").to_owned();
            (name, line["message"].clone())
        });
        lines.collect()
    }

    #[track_caller]
    fn assert_golden<T: Serialize + DeserializeOwned + Debug>(name: &str, message: &T) {
        let promised = golden().remove(name).unwrap_or(Value::Null);
        let written = serde_json::to_value(message).expect("it is JSON");
        assert_eq!(written, promised, "{name}");
        let read: T = serde_json::from_value(promised).expect("it is read");
        assert_eq!(format!("{read:?}"), format!("{message:?}"), "{name}");
    }

    fn order(order: impl Into<Order>) -> Call {
        Call::Order(order.into())
    }

    #[test]
    fn every_call_is_as_promised() {
        let hello = Hello {
            protocol: 3,
            program: "0.1.0".into(),
            features: FEATURES.map(str::to_owned).to_vec(),
            cause: None,
        };
        assert_golden("hello", &hello);
        assert!(!hello.stays());
        let asking = Hello {
            cause: Some("4b5c".into()),
            ..hello
        };
        assert_golden("hello for a request", &asking);
        assert_eq!(asking.cause(), Cause::parse("4b5c"));
        assert_golden("hello of an owned sandbox", &Hello::of_owned());
        assert_golden("link", &Call::Link);
        assert_golden("watch", &Call::Watch);
        assert_golden("stats", &Call::Stats);
        assert_golden("samples", &Call::Samples);
        assert_golden("execs", &Call::Execs);
        assert_golden("mounts", &Call::Mounts);
        assert_golden("picture", &Call::Picture);
        assert_golden("view", &Call::View);
        assert_golden(
            "stop",
            &order(Stop {
                grace_ms: Some(10_000),
            }),
        );
        assert_golden("kill", &order(Kill {}));
        let boot_timeout_ms = Some(60_000);
        assert_golden("start", &order(Start { boot_timeout_ms }));
        assert_golden("remove", &order(Remove {}));
        let checkpoint = TakeCheckpoint {
            tag: Some("before".into()),
            replace: Replace::No,
        };
        assert_golden("checkpoint", &order(checkpoint));
        assert_golden("revert", &order(Goal::State("before".into())));
        assert_golden("undo", &order(Goal::Undo { steps: 1 }));
        assert_golden("redo", &order(Goal::Redo));
        assert_golden("forget", &order(Forget::These(vec!["before".into()])));
        assert_golden("forget all", &order(Forget::All));
        assert_golden("forget all but", &order(Forget::AllBut(3)));
        assert_golden("lend copies", &order(Wanted::Copies));
        assert_golden("lend state", &order(Wanted::State("before".into())));
        let state = "0123456789abcdef".into();
        assert_golden("give back", &order(GiveBack { state }));
        assert_golden("pause", &order(Pause {}));
        assert_golden("resume", &order(Resume {}));
        let mount = MountSpec {
            host: "/srv/data".into(),
            guest: "/data".into(),
            access: MountAccess::ReadOnly,
            owner: None,
        };
        assert_golden("mount", &order(mount));
        let path = "/data".into();
        let in_use = InUse::Refuse;
        assert_golden("unmount", &order(Unmount { path, in_use }));
        let versions = [("/f".into(), "7 1 2 3 4".into())].into();
        assert_golden("applied", &order(Applied { mount: 1, versions }));
    }

    #[test]
    fn every_answer_is_as_promised() {
        assert_golden("done", &Answer::Ok(()));
        let state = State {
            phase: Some(Phase::Stopped),
            reason: Some("stopped".into()),
            saved: None,
            save_failed: None,
        };
        assert_golden("state", &Answer::Ok(state));
        let lent = LentState {
            state: "0123456789abcdef".into(),
            pause_ms: 8.5,
            degraded: vec![Degradation::WholeDisk {
                reason: "layer 0123456789abcdef is damaged".into(),
            }],
            consistency: Consistency::Exact,
            disk_only: false,
        };
        assert_golden("lent", &Answer::Ok(lent));
        let report = Error::WrongState {
            name: "a".into(),
            phase: Phase::Stopped,
            reason: None,
            verb: Verb::Pause,
        }
        .report();
        assert_golden("refused", &Answer::<()>::Err(report.clone()));
        assert_golden("failed", &News::Failed(report));
    }

    #[test]
    fn every_word_of_a_lease_is_as_promised() {
        assert_golden("loaded", &News::Loaded);
        assert_golden("committed", &News::Committed);
        let digest = "ab".repeat(32);
        assert_golden("saved", &News::Saved { digest });
        let task = Task::Copy {
            source: "0123456789abcdef".into(),
            state: "fedcba9876543210".into(),
            name: "a-1".into(),
            mounts: ForkMounts::ReadOnly,
        };
        assert_golden("copy", &task);
        let task = Task::Order {
            reference: "a".into(),
            order: Resume {}.into(),
        };
        assert_golden("resume at rest", &task);
        let bytes = golden().remove("words").expect("it is promised");
        let words = Word::ALL;
        assert_eq!(json!(words.map(|word| char::from(word.byte()))), bytes);
        assert!(
            words
                .iter()
                .all(|word| Word::of(word.byte()) == Some(*word))
        );
    }

    #[test]
    fn every_golden_message_is_checked() {
        let source = include_str!("wire.rs");
        for name in golden().keys() {
            let quoted = format!("\"{name}\"");
            assert!(source.contains(&quoted), "{name} is checked by no test");
        }
    }

    #[tokio::test]
    async fn a_message_that_is_too_long_or_cut_is_an_error() {
        let mut long = (LIMIT + 1).to_le_bytes().to_vec();
        long.extend([b' '; 16]);
        let error = read::<Value>(&mut &long[..]).await.expect_err("too long");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        let cut = [5, 0, 0, 0, b'n', b'u'];
        let error = read::<Value>(&mut &cut[..]).await.expect_err("cut");
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
