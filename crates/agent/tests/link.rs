//! Breaks, garbage, and what survives them.

mod client;

use client::{Agent, exec, shell};
use sandtree_proto::frame::encode_data;
use sandtree_proto::{
    ExecStart, Frame, HostMessage, Identity, Network, Open, Outcome, Reply, Request, StreamId,
};

#[test]
fn a_break_loses_no_byte() {
    let mut agent = Agent::start(&[]);
    let script = "i=0; while [ $i -lt 200000 ]; do echo $i; i=$((i+1)); done; echo done >&2";
    let channel = agent.client.open(Open::Exec(ExecStart {
        tag: "count".into(),
        ..shell(script)
    }));
    for round in 1..=5u64 {
        agent.client.until("some output", |client| {
            client.channels[&channel].counts[0] > round * 100_000
        });
        agent.client.lose();
        // The break cuts off half a frame.
        let mut half = Vec::new();
        encode_data(&mut half, channel, StreamId::In, 0, &[7; 5000]);
        agent.client.raw(&half[..2000]);
        agent.client.connect();
        let hello = agent.client.hello.clone().unwrap();
        assert_eq!(
            (hello.channels[0].channel, hello.channels[0].tag.as_str()),
            (channel, "count")
        );
        agent.client.resume_all();
    }
    let seen = agent.client.finish(channel);
    let expected: String = (0..200_000).map(|i| format!("{i}\n")).collect();
    assert!(seen.out == expected.as_bytes());
    assert_eq!(seen.err, b"done\n");
}

#[test]
fn input_sent_again_after_a_break_arrives_once() {
    let mut agent = Agent::start(&[]);
    let channel = agent.client.open(Open::Exec(ExecStart {
        stdin: true,
        ..exec(&["cat"])
    }));
    agent.client.feed_some(channel, b"hello ");
    agent
        .client
        .until("echo", |client| client.channels[&channel].counts[0] == 6);
    agent.client.connect();
    assert_eq!(agent.client.hello.as_ref().unwrap().channels[0].received, 6);
    agent.client.resume_all();
    agent.client.channels.get_mut(&channel).unwrap().in_sent = 2;
    agent.client.feed(channel, b"llo world");
    assert_eq!(agent.client.finish(channel).out, b"hello world");
}

#[test]
fn a_command_that_ended_during_a_break_keeps_output_and_outcome() {
    let mut agent = Agent::start(&[]);
    let channel = agent.client.open(Open::Exec(shell("echo kept; exit 7")));
    while agent
        .client
        .hello
        .as_ref()
        .is_none_or(|hello| hello.channels.first().is_none_or(|c| c.outcome.is_none()))
    {
        agent.client.lose();
        agent.client.connect();
    }
    let state = agent.client.hello.clone().unwrap().channels.remove(0);
    assert_eq!(
        (state.outcome, state.out.1),
        (Some(Outcome::Exited { code: 7 }), 5)
    );
    agent.client.send(&HostMessage::Resume {
        channel,
        out: state.out.0,
        err: state.err.0,
    });
    agent.client.until("the rest", |client| {
        client.channels[&channel].ended == [true, true]
    });
    assert_eq!(&agent.client.channels[&channel].out[..], b"kept\n");
}

#[test]
fn garbage_is_survived() {
    let mut agent = Agent::start(&[]);
    let mut state = 12345u32;
    let garbage: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    })
    .take(300_000)
    .collect();
    agent.client.raw(&garbage);
    agent.client.connect();
    assert_eq!(agent.client.request(Request::Ping), Ok(Reply::Done));
    agent.client.frame(&Frame::Message(vec![0xff; 100]));
    agent.client.connect();
    assert_eq!(agent.client.run(shell("echo fine")).out, b"fine\n");
}

#[test]
fn a_host_beyond_its_window_loses_the_channel_not_the_link() {
    let mut agent = Agent::start(&[]);
    let channel = agent.client.open_with(
        1000,
        Open::Exec(ExecStart {
            stdin: true,
            ..exec(&["sleep", "100"])
        }),
    );
    let mut frame = Vec::new();
    encode_data(&mut frame, channel, StreamId::In, 0, &[0; 50_000]);
    agent.client.raw(&frame);
    agent.client.until("refusal", |client| {
        client.channels[&channel].outcome.is_some()
    });
    let outcome = agent.client.channels[&channel].outcome.clone();
    assert!(matches!(outcome, Some(Outcome::Failed(_))), "{outcome:?}");
    assert_eq!(agent.client.request(Request::Ping), Ok(Reply::Done));
}

#[test]
fn channels_are_limited_and_all_fit_the_hello() {
    let mut agent = Agent::start(&[]);
    let tag = "t".repeat(64);
    let start = || ExecStart {
        tag: tag.clone(),
        ..exec(&["/nonexistent/with/a/very/long/path/so/that/the/message/is/long/too"])
    };
    let channels: Vec<u32> = (0..321)
        .map(|_| agent.client.open(Open::Exec(start())))
        .collect();
    agent.client.until("ends", |client| {
        channels
            .iter()
            .all(|channel| client.channels[channel].outcome.is_some())
    });
    agent.client.connect();
    assert_eq!(agent.client.hello.as_ref().unwrap().channels.len(), 320);
}

#[test]
fn a_channel_beyond_the_limit_is_ended_and_not_kept() {
    let mut agent = Agent::start(&[]);
    let kept: Vec<u32> = (0..320)
        .map(|_| agent.client.open(Open::Exec(exec(&["/nonexistent"]))))
        .collect();
    for _ in 0..2000 {
        let channel = agent.client.open(Open::ReadFile {
            path: b"/etc/passwd".to_vec(),
        });
        let outcome = agent.client.finish(channel).outcome;
        assert!(
            matches!(&outcome, Some(Outcome::Failed(failure)) if failure.errno == libc::EMFILE),
            "{outcome:?}"
        );
    }
    agent.client.connect();
    assert_eq!(agent.client.hello.as_ref().unwrap().channels.len(), 320);
    agent.client.resume_all();
    agent.client.finish(kept[0]);
    assert_eq!(agent.client.run(shell("echo again")).out, b"again\n");
}

#[test]
fn a_failure_about_a_long_name_that_is_not_utf8_arrives() {
    let mut agent = Agent::start(&[]);
    let name = [b"/", &[0xff; 60_000][..]].concat();
    let seen = agent.client.run(ExecStart {
        argv: vec![name.clone()],
        ..exec(&[])
    });
    assert!(
        matches!(&seen.outcome, Some(Outcome::NotStarted(failure)) if failure.message.len() <= 4096)
    );
    let failure = agent
        .client
        .request(Request::Stat {
            path: name,
            follow: true,
        })
        .unwrap_err();
    assert_eq!(failure.errno, libc::ENAMETOOLONG);
    assert!(
        failure.message.ends_with(": File name too long"),
        "{}",
        failure.message
    );
}

#[test]
fn outside_a_guest_the_machine_is_not_changed() {
    let mut agent = Agent::start(&[]);
    let identity = Identity {
        hostname: "x".into(),
        machine_id: "0".repeat(32),
        unix_time_ns: 0,
        entropy: vec![],
        network: Network::Full,
    };
    assert_eq!(
        agent
            .client
            .request(Request::Configure(identity))
            .unwrap_err()
            .errno,
        libc::EPERM
    );
    assert_eq!(
        agent
            .client
            .request(Request::Shutdown { grace_ms: 0 })
            .unwrap_err()
            .errno,
        libc::EPERM
    );
    let Ok(Reply::Metrics(metrics)) = agent.client.request(Request::Metrics) else {
        panic!("the agent reports no metrics")
    };
    assert!(metrics.processes > 0);
}
