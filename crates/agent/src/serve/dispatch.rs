//! The host's messages, and what the agent does for each.

use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use rustix::io::Errno;
use sandtree_proto::{
    AgentMessage, ExecStart, Failure, Frame, HostHello, HostMessage, Identity, MountEnd,
    MountStart, Open, Outcome, Rebirth, Reply, Request, StreamId,
};

use super::{Agent, CHANNELS_MAX, Leaving, Role};
use crate::channel::{Cancel, Channel, Ends, Work};
use crate::exec::spawn::{pipe, spawn};
use crate::failure::{OrFailure, cut, path, refusal};
use crate::feed::{Intake, feed};
use crate::files::{self, Target};
use crate::hooks::{CONSOLE, HookDir, Hooks};
use crate::init::shutdown::Way;
use crate::input::{Input, InputError};
use crate::link::Event;
use crate::output::Output;
use crate::tree::LeftOut;
use crate::tunnel::Connecting;
use crate::{attributes, identity, metrics, tree, watch};

/// How long the parallel parts of the boot may take; the host waits 200 s.
const SETTLES_WITHIN: Duration = Duration::from_secs(180);
const WINDOW_MAX: u32 = 1024 * 1024;
/// The hello contains the tags, and must fit one frame.
const TAG_MAX: usize = 64;

impl Agent {
    pub(super) fn dispatch(&mut self, event: Event) {
        match event {
            Event::Restarted => self
                .channels
                .values_mut()
                .for_each(|channel| channel.flowing = false),
            Event::Message(message) => self.message(message),
            Event::Data {
                channel,
                stream: StreamId::In,
                offset,
                bytes,
            } => {
                self.input(channel, |channel| channel.input.receive(offset, bytes));
            }
            Event::Eof {
                channel,
                stream: StreamId::In,
                offset,
            } => {
                self.input(channel, |channel| channel.input.end(offset));
            }
            Event::Data { .. } | Event::Eof { .. } => {
                self.link.fault("data on a stream to the host")
            }
            Event::Window {
                channel,
                stream,
                consumed,
            } => self.window(channel, stream, consumed),
        }
    }

    fn message(&mut self, message: HostMessage) {
        match message {
            HostMessage::Hello(hello) => self.hello(&hello),
            HostMessage::Open {
                channel,
                window,
                open,
            } => self.open(channel, window, open),
            HostMessage::Resume { channel, out, err } => self.resume(channel, out, err),
            HostMessage::Signal { channel, signal } => {
                if let Some(exec) = self.channels.get_mut(&channel).and_then(Channel::exec) {
                    exec.signal(signal);
                }
            }
            HostMessage::Resize { channel, size } => {
                if let Some(exec) = self.channels.get_mut(&channel).and_then(Channel::exec) {
                    exec.resize(size);
                }
            }
            HostMessage::Close { channel } => {
                if let Some(channel) = self.channels.remove(&channel) {
                    self.look_after(channel.close());
                }
            }
            HostMessage::Request { id, request } => self.request(id, request),
        }
    }

    fn hello(&mut self, host: &HostHello) {
        let channels = self
            .channels
            .iter()
            .map(|(&number, channel)| channel.state(number))
            .collect();
        self.link.greet(host, channels);
    }

    fn resume(&mut self, number: u32, out: u64, err: u64) {
        let Some(channel) = self.channels.get_mut(&number) else {
            return;
        };
        match channel.resume(out, err) {
            Ok(()) => {
                let consumed = channel.input.report_again();
                // The message about its start may also be lost.
                if let Some(pid) = channel.started {
                    self.link.send(&AgentMessage::Started {
                        channel: number,
                        pid,
                    });
                }
                self.link.send_frame(&Frame::Window {
                    channel: number,
                    stream: StreamId::In,
                    consumed,
                });
            }
            Err(error) => self.link.fault(error),
        }
    }

    /// Input for an unknown channel was sent before the host learned of the channel's end.
    fn input(&mut self, number: u32, receive: impl FnOnce(&mut Channel) -> Result<(), InputError>) {
        let Some(channel) = self.channels.get_mut(&number) else {
            return;
        };
        match receive(channel) {
            Ok(()) => {}
            Err(error @ InputError::Gap { .. }) => self.link.fault(error),
            Err(error @ InputError::Overrun { .. }) if !channel.is_over() => {
                let remains = channel.violate(refusal(Errno::NOBUFS, error.to_string()));
                self.look_after(remains);
            }
            Err(InputError::Overrun { .. }) => {}
        }
    }

    fn window(&mut self, number: u32, stream: StreamId, consumed: u64) {
        let Some(output) = self
            .channels
            .get_mut(&number)
            .and_then(|channel| channel.output(stream))
        else {
            return;
        };
        if let Err(error) = output.stream().consumed(consumed, &mut self.spares) {
            self.link.fault(error);
        }
    }

    fn open(&mut self, number: u32, window: u32, open: Open) {
        if self.channels.contains_key(&number) {
            return self
                .link
                .fault(format_args!("channel {number} is open already"));
        }
        let command = match &open {
            Open::Exec(start) => Some(start.tag.clone()),
            _ => None,
        };
        if self.channels.len() >= CHANNELS_MAX {
            return self.turn_away(number, command.is_some());
        }
        let opened = admit(window, &open)
            .and_then(|()| self.begin(number, window.min(WINDOW_MAX) as usize, open));
        let channel = opened.unwrap_or_else(|failure| match command {
            Some(tag) => Channel::failed(shortened(tag), Outcome::NotStarted(failure)),
            None => Channel::failed(String::new(), Outcome::Failed(failure)),
        });
        self.channels.insert(number, channel);
    }

    /// Ends a channel beyond the limit without keeping it: the hello would otherwise grow beyond
    /// its limit. If the answer is lost in a break, the host opens the channel again.
    fn turn_away(&mut self, number: u32, is_command: bool) {
        let failure = refusal(
            Errno::MFILE,
            format!("{CHANNELS_MAX} channels are open in the guest"),
        );
        for stream in [StreamId::Out, StreamId::Err] {
            self.link.send_frame(&Frame::Eof {
                channel: number,
                stream,
                offset: 0,
            });
        }
        let outcome = if is_command {
            Outcome::NotStarted(failure)
        } else {
            Outcome::Failed(failure)
        };
        self.link.send(&AgentMessage::Ended {
            channel: number,
            outcome,
        });
    }

    fn begin(&mut self, number: u32, window: usize, open: Open) -> Result<Channel, Failure> {
        match open {
            Open::Exec(start) => self.begin_exec(number, window, &start),
            Open::ReadFile { path: from } => {
                self.begin_output(number, window, move |out| files::read(path(&from), out))
            }
            Open::ReadFrom {
                path: from,
                offset,
                length,
            } => self.begin_output(number, window, move |out| {
                files::read_from(path(&from), offset, length, out)
            }),
            Open::ListDir { path: of } => {
                self.begin_output(number, window, move |out| files::list(path(&of), out))
            }
            Open::TarOut { path: of } => self.begin_pack(number, window, of),
            Open::TarIn { path: to } => self.begin_unpack(number, window, to),
            Open::WriteFile {
                path: to,
                mode,
                uid,
                gid,
            } => {
                let target = Target {
                    path: path(&to).to_owned(),
                    mode,
                    uid,
                    gid,
                };
                self.begin_input(number, window, move |input, cancel| {
                    files::write(&target, input, cancel)
                })
            }
            Open::Connect { port } => Ok(self.begin_tunnel(number, window, port)),
            Open::Watch { path: at, scope } => self.begin_output(number, window, move |out| {
                watch::watch(path(&at), scope, out)
            }),
            Open::ReadClipboard => {
                let screen = self.screen.clone();
                self.begin_output(number, window, move |out| screen.send_clipboard(out))
            }
            Open::WriteClipboard => {
                let screen = self.screen.clone();
                self.begin_input(number, window, move |input, cancel| {
                    screen.receive_clipboard(input, cancel)
                })
            }
            Open::Detached(_)
            | Open::DetachedAs { .. }
            | Open::Attach { .. }
            | Open::Discard { .. } => Err(refusal(
                Errno::NOSYS,
                "only the host keeps detached commands",
            )),
        }
    }

    fn begin_exec(
        &mut self,
        number: u32,
        window: usize,
        start: &ExecStart,
    ) -> Result<Channel, Failure> {
        let spawned = spawn(&self.place.defaults, start)?;
        let pid = spawned.exec.pid().as_raw_nonzero().get() as u32;
        self.link.send(&AgentMessage::Started {
            channel: number,
            pid,
        });
        let ends = Ends {
            input: spawned.input,
            out: Some(spawned.out),
            err: spawned.err,
        };
        let mut channel = Channel::new(
            window,
            start.tag.clone(),
            Work::Exec(Box::new(spawned.exec)),
            ends,
        );
        channel.started = Some(pid);
        Ok(channel)
    }

    fn begin_tunnel(&mut self, number: u32, window: usize, port: u16) -> Channel {
        let mut channel = Channel::connecting(window);
        if channel.progress(Connecting::begin(port)) {
            self.link.send(&AgentMessage::Started {
                channel: number,
                pid: 0,
            });
        }
        channel
    }

    /// Work that produces `Out`.
    fn begin_output(
        &mut self,
        number: u32,
        window: usize,
        work: impl FnOnce(OwnedFd) -> Result<(), Failure> + Send + 'static,
    ) -> Result<Channel, Failure> {
        let (reader, writer) = pipe_to_host()?;
        let ticket = self.workers.run_channel(number, move || work(writer))?;
        let work = Work::File {
            ticket,
            cancel: Cancel::default(),
            result: None,
        };
        Ok(Channel::new(
            window,
            String::new(),
            work,
            Ends {
                out: Some(reader),
                ..Ends::default()
            },
        ))
    }

    /// Work that reads `In`.
    fn begin_input(
        &mut self,
        number: u32,
        window: usize,
        work: impl FnOnce(Intake, &Cancel) -> Result<(), Failure> + Send + 'static,
    ) -> Result<Channel, Failure> {
        let (feed, intake) = feed(window, self.workers.to_loop());
        let cancel = Cancel::default();
        let seen = cancel.clone();
        let ticket = self
            .workers
            .run_channel(number, move || work(intake, &seen))?;
        let work = Work::File {
            ticket,
            cancel,
            result: None,
        };
        let mut channel = Channel::new(window, String::new(), work, Ends::default());
        channel.input = Input::of_thread(window, feed);
        Ok(channel)
    }

    /// A tree on `Out`, and on `Err` the list of what it leaves out.
    fn begin_pack(&mut self, number: u32, window: usize, of: Vec<u8>) -> Result<Channel, Failure> {
        let (err, report) = pipe_to_host()?;
        let mut channel = self.begin_output(number, window, move |out| {
            let mut left_out = LeftOut::new(window);
            tree::pack(path(&of), out, &mut left_out)?;
            left_out.tell(report).or_failure(cannot_report)
        })?;
        channel.err = Output::new(window, Some(err));
        Ok(channel)
    }

    /// A tree from `In`, and on `Err` the list of what it leaves out.
    fn begin_unpack(
        &mut self,
        number: u32,
        window: usize,
        to: Vec<u8>,
    ) -> Result<Channel, Failure> {
        let (err, report) = pipe_to_host()?;
        let mut channel = self.begin_input(number, window, move |input, _| {
            let mut left_out = LeftOut::new(window);
            tree::unpack(path(&to), input, &mut left_out)?;
            left_out.tell(report).or_failure(cannot_report)
        })?;
        channel.err = Output::new(window, Some(err));
        Ok(channel)
    }

    fn request(&mut self, id: u32, request: Request) {
        let answered = match request {
            Request::Ping => Some(Ok(Reply::Done)),
            Request::Metrics => Some(metrics::read().map(Reply::Metrics)),
            Request::Shutdown { grace_ms } => Some(self.shut_down(grace_ms)),
            Request::Restored(rebirth) => self.on_restored(id, rebirth),
            Request::Settle => self.settle_down(id).err().map(Err),
            Request::Freeze { thaw_after_ms } => self.freeze(id, thaw_after_ms).err().map(Err),
            Request::Thaw => self.thaw(id).err().map(Err),
            Request::Configure(who) => self.configure(id, who).err().map(Err),
            Request::Clock { step_ns } => Some(self.clock(step_ns)),
            Request::Mount(start) => self.mount(id, start).err().map(Err),
            Request::Unmount(end) => self.unmount(id, end).err().map(Err),
            Request::Boot(_) => Some(Err(refusal(Errno::ALREADY, "the guest has booted"))),
            Request::Screen(request) => {
                let to_loop = self.workers.to_loop();
                let generation = self.link.generation();
                self.screen.request(request, id, generation, to_loop);
                None
            }
            other => self.delegate(id, other).err().map(Err),
        };
        if let Some(reply) = answered {
            self.link.send(&AgentMessage::Reply { id, reply });
        }
    }

    fn shut_down(&mut self, grace_ms: u32) -> Result<Reply, Failure> {
        self.refuse_guestless("shut down")?;
        self.leaving = Some(Leaving::new(
            Way::PowerOff,
            Duration::from_millis(u64::from(grace_ms)),
        ));
        Ok(Reply::Done)
    }

    fn refuse_guestless(&self, what: &str) -> Result<(), Failure> {
        match self.place.role {
            Role::Init | Role::UnderInit => Ok(()),
            Role::Guestless => Err(refusal(
                Errno::PERM,
                format!("cannot {what}: the agent is not in a guest"),
            )),
        }
    }

    /// Gives the guest its new identity: at once if no step may wait, because to start a thread
    /// costs an emulated processor more than all the other steps.
    fn on_restored(&mut self, id: u32, rebirth: Rebirth) -> Option<Result<Reply, Failure>> {
        let is_guest = self.refuse_guestless("restore").is_ok();
        self.screen.restored();
        if is_guest && self.means.is_at_hand(&rebirth) && self.has_no_hooks() {
            let assumed = self.means.assume_again(&rebirth);
            return Some(assumed.map(|()| Reply::Restored { hooks: Vec::new() }));
        }
        self.restore_in_thread(id, rebirth).err().map(Err)
    }

    fn has_no_hooks(&self) -> bool {
        let hooks = self.place.hooks.as_ref();
        hooks.is_none_or(HookDir::is_known_empty)
    }

    /// In a thread, because the hooks may take long.
    fn restore_in_thread(&mut self, id: u32, rebirth: Rebirth) -> Result<(), Failure> {
        let refused = self.refuse_guestless("restore");
        // Outside of a guest, a restore consists of the given hooks only.
        let Some(hooks) = &self.place.hooks else {
            return refused;
        };
        let dir = hooks.path().to_owned();
        let in_guest = refused.is_ok();
        let means = Arc::clone(&self.means);
        let (waiter, exits) = mpsc::channel();
        self.exit_waiters.push(waiter);
        let console = in_guest.then_some(CONSOLE);
        let hooks = Hooks {
            dir,
            exits,
            to_loop: self.workers.to_loop(),
            console,
        };
        self.workers
            .run_request(id, self.link.generation(), move || {
                if in_guest {
                    means.assume_again(&rebirth)?;
                }
                Ok(Reply::Restored {
                    hooks: hooks.run(&rebirth),
                })
            })
    }

    fn settle_down(&self, id: u32) -> Result<(), Failure> {
        let settling = self.place.settling.clone();
        self.workers
            .run_request(id, self.link.generation(), move || {
                if settling.wait(SETTLES_WITHIN) {
                    Ok(Reply::Done)
                } else {
                    Err(refusal(Errno::TIMEDOUT, "the guest is still booting"))
                }
            })
    }

    fn freeze(&self, id: u32, thaw_after_ms: u32) -> Result<(), Failure> {
        self.refuse_guestless("freeze")?;
        let freezer = Arc::clone(&self.freezer);
        let thaw_after = Duration::from_millis(u64::from(thaw_after_ms));
        self.workers
            .run_request(id, self.link.generation(), move || {
                freezer.freeze(thaw_after).map(|()| Reply::Done)
            })
    }

    fn thaw(&self, id: u32) -> Result<(), Failure> {
        let freezer = Arc::clone(&self.freezer);
        self.workers
            .run_request(id, self.link.generation(), move || {
                Ok(Reply::Thawed {
                    held: freezer.thaw()?,
                })
            })
    }

    fn mount(&self, id: u32, start: MountStart) -> Result<(), Failure> {
        self.refuse_guestless("mount")?;
        let mounts = Arc::clone(&self.mounts);
        self.workers
            .run_request(id, self.link.generation(), move || {
                mounts.mount(&start).map(|()| Reply::Done)
            })
    }

    fn unmount(&self, id: u32, end: MountEnd) -> Result<(), Failure> {
        let mounts = Arc::clone(&self.mounts);
        self.workers
            .run_request(id, self.link.generation(), move || {
                mounts.unmount(&end).map(|()| Reply::Done)
            })
    }

    /// Runs at once and in the loop, because a late answer would be inexact.
    fn clock(&self, step_ns: i64) -> Result<Reply, Failure> {
        if step_ns != 0 {
            self.refuse_guestless("set the clock")?;
            identity::step_clock(step_ns)?;
        }
        Ok(Reply::Clock {
            unix_time_ns: identity::unix_time_ns(),
        })
    }

    /// Gives the guest its identity in a thread, because its network may take a while to appear.
    /// Then its init may start.
    fn configure(&mut self, id: u32, who: Identity) -> Result<(), Failure> {
        self.refuse_guestless("configure")?;
        let hold = self.place.hold.take();
        // The loop may wait for the disk here: a guest that boots has no other work yet.
        if let Some(hooks) = &mut self.place.hooks {
            hooks.look();
        }
        let means = Arc::clone(&self.means);
        self.workers
            .run_request(id, self.link.generation(), move || {
                let assumed = means.assume(&who);
                drop(hold);
                assumed.map(|()| Reply::Done)
            })
    }

    /// Requests that may wait for a disk.
    fn delegate(&self, id: u32, request: Request) -> Result<(), Failure> {
        self.workers
            .run_request(id, self.link.generation(), move || match request {
                Request::Stat { path: of, follow } => {
                    files::stat(path(&of), follow).map(Reply::Stat)
                }
                Request::MakeDir {
                    path: at,
                    parents,
                    mode,
                } => files::make_dir(path(&at), parents, mode),
                Request::Rename { from, to } => files::rename(path(&from), path(&to)),
                Request::Remove {
                    path: at,
                    recursive,
                } => files::remove(path(&at), recursive),
                Request::Sync => {
                    rustix::fs::sync();
                    Ok(Reply::Done)
                }
                Request::LeaveTsc => identity::leave_tsc().map(|()| Reply::Done),
                Request::SetOwner { path: of, uid, gid } => {
                    attributes::set_owner(path(&of), uid, gid)
                }
                Request::Attributes { path: of, prefix } => {
                    attributes::attributes(path(&of), &prefix)
                }
                Request::SetAttributes {
                    path: of,
                    prefix,
                    attributes: wanted,
                } => attributes::set_attributes(path(&of), &prefix, &wanted),
                Request::Ping
                | Request::Metrics
                | Request::Shutdown { .. }
                | Request::Restored(_)
                | Request::Configure(_)
                | Request::Settle
                | Request::Freeze { .. }
                | Request::Thaw
                | Request::Boot(_)
                | Request::Mount(_)
                | Request::Unmount(_)
                | Request::Screen(_)
                | Request::Clock { .. } => unreachable!("answered before"),
            })
    }
}

fn cannot_report() -> String {
    "cannot tell what was left out".into()
}

fn admit(window: u32, open: &Open) -> Result<(), Failure> {
    if window == 0 {
        return Err(refusal(Errno::INVAL, "a channel needs a window"));
    }
    match open {
        Open::Exec(start) if start.tag.len() > TAG_MAX => Err(refusal(
            Errno::INVAL,
            format!("a tag has at most {TAG_MAX} bytes"),
        )),
        _ => Ok(()),
    }
}

/// A pipe whose reading end never blocks the loop.
fn pipe_to_host() -> Result<(OwnedFd, OwnedFd), Failure> {
    let (reader, writer) = pipe().or_failure(|| "cannot make a pipe".into())?;
    rustix::io::ioctl_fionbio(&reader, true).or_failure(|| "cannot prepare a pipe".into())?;
    Ok((reader, writer))
}

fn shortened(mut tag: String) -> String {
    cut(&mut tag, TAG_MAX);
    tag
}

#[cfg(test)]
mod tests {
    use sandtree_proto::message::to_frame;
    use sandtree_proto::{AgentHello, ChannelState};

    use super::*;

    /// Numbers take most bytes when they are largest.
    #[test]
    fn the_largest_hello_fits_one_frame() {
        let channel = Channel::failed(
            "t".repeat(TAG_MAX),
            Outcome::NotStarted(Failure {
                errno: i32::MIN,
                message: "m".repeat(10_000),
            }),
        );
        let state = ChannelState {
            received: u64::MAX,
            out: (u64::MAX, u64::MAX),
            err: (u64::MAX, u64::MAX),
            ..channel.state(u32::MAX)
        };
        let channels = vec![state; CHANNELS_MAX];
        let build = env!("CARGO_PKG_VERSION").to_owned();
        to_frame(&AgentMessage::Hello(AgentHello {
            version: u16::MAX,
            build,
            channels,
        }))
        .unwrap();
    }
}
