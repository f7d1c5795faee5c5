//! Layers on top of layers, by the rules of the OCI image specification.

use super::Bench;
use super::archive::Archive;

fn lower() -> Vec<u8> {
    Archive::default()
        .dir("etc")
        .file("etc/a", "lower a")
        .file("etc/b", "lower b")
        .file("etc/sub/c", "lower c")
        .file("etc/sub/d", "lower d")
        .symlink("link", "etc")
        .end()
}

/// All names after a layer was added on top of the lower one.
fn after(upper: &[u8]) -> Vec<String> {
    let mut bench = Bench::new();
    bench.layer(&lower()).expect("it is taken");
    bench.layer(upper).expect("it is taken");
    let names = super::listing::of_tree(&bench.builder.staging).into_keys();
    let names = names
        .map(|name| String::from_utf8(name).expect("it is text"))
        .filter(|name| !name.is_empty())
        .collect();
    bench.finish();
    names
}

#[test]
fn a_whiteout_hides_files_of_lower_layers() {
    let hidden = Archive::default()
        .file("etc/.wh.a", "")
        .file("etc/.wh.sub", "");
    assert_eq!(after(&hidden.end()), ["etc", "etc/b", "link"]);
    let missing = Archive::default()
        .file("etc/.wh.zzz", "")
        .file("no/where/.wh.a", "")
        .file("etc/a/.wh.x", "");
    assert_eq!(after(&missing.end()).len(), 7);
    let over_link = Archive::default()
        .file("link/.wh.a", "")
        .file(".wh.link", "");
    assert_eq!(
        after(&over_link.end()),
        ["etc", "etc/b", "etc/sub", "etc/sub/c", "etc/sub/d"]
    );
}

#[test]
fn a_whiteout_keeps_files_of_its_own_layer() {
    for upper in [
        Archive::default()
            .file("etc/a", "new")
            .file("etc/.wh.a", ""),
        Archive::default()
            .file("etc/.wh.a", "")
            .file("etc/a", "new"),
    ] {
        let mut bench = Bench::new();
        bench.layer(&lower()).expect("it is taken");
        bench.layer(&upper.end()).expect("it is taken");
        assert_eq!(bench.text("etc/a"), Some("new".into()));
        assert!(!bench.builder.exists(b"etc/.wh.a"));
    }
    for upper in [
        Archive::default()
            .file("etc/sub/new", "")
            .file("etc/.wh.sub", ""),
        Archive::default()
            .file("etc/.wh.sub", "")
            .file("etc/sub/new", ""),
        Archive::default()
            .dir("etc/sub")
            .file("etc/sub/new", "")
            .file("etc/.wh.sub", ""),
    ] {
        assert_eq!(
            after(&upper.end()),
            ["etc", "etc/a", "etc/b", "etc/sub", "etc/sub/new", "link"]
        );
    }
}

#[test]
fn an_opaque_directory_hides_only_lower_layers() {
    for upper in [
        Archive::default()
            .file("etc/.wh..wh..opq", "")
            .file("etc/new", "")
            .file("etc/sub/e", ""),
        Archive::default()
            .file("etc/new", "")
            .file("etc/sub/e", "")
            .file("etc/.wh..wh..opq", ""),
        Archive::default()
            .file("etc/new", "")
            .file("etc/.wh..wh..opq", "")
            .file("etc/sub/e", "")
            .file("etc/.wh..wh..opq", ""),
    ] {
        assert_eq!(
            after(&upper.end()),
            ["etc", "etc/new", "etc/sub", "etc/sub/e", "link"]
        );
    }
    assert_eq!(
        after(
            &Archive::default()
                .file(".wh..wh..opq", "")
                .file("x", "")
                .end()
        ),
        ["x"]
    );
    assert_eq!(
        after(
            &Archive::default()
                .file("x", "")
                .file(".wh..wh..opq", "")
                .end()
        ),
        ["x"]
    );
}

#[test]
fn a_new_hard_link_stays_when_the_old_name_is_hidden() {
    for upper in [
        Archive::default()
            .hard_link("kept", "etc/a")
            .file("etc/.wh..wh..opq", ""),
        Archive::default()
            .hard_link("kept", "etc/a")
            .hard_link("etc/kept", "etc/b")
            .file("etc/.wh..wh..opq", ""),
    ] {
        let mut bench = Bench::new();
        bench.layer(&lower()).expect("it is taken");
        bench.layer(&upper.end()).expect("it is taken");
        assert_eq!(bench.text("kept"), Some("lower a".into()));
        assert!(!bench.builder.exists(b"etc/a") && !bench.builder.exists(b"etc/b"));
        bench.finish();
    }
}

#[test]
fn directories_and_other_nodes_replace_each_other() {
    let mut bench = Bench::new();
    bench.layer(&lower()).expect("it is taken");
    bench
        .layer(
            &Archive::default()
                .dir("etc")
                .dir("link")
                .file("link/x", "x")
                .file("etc/sub", "file")
                .end(),
        )
        .expect("it is taken");
    assert_eq!(
        bench.text("etc/a"),
        Some("lower a".into()),
        "a directory that replaces a directory keeps its entries"
    );
    assert_eq!(bench.text("link/x"), Some("x".into()));
    assert!(
        !bench.builder.exists(b"etc/x"),
        "a directory replaces a link"
    );
    assert_eq!(bench.text("etc/sub"), Some("file".into()));
    bench.finish();
}

#[test]
fn whiteouts_with_invalid_names_are_refused() {
    for name in ["etc/.wh...", "etc/.wh..", "etc/.wh.", "etc/.wh.x/y"] {
        let mut bench = Bench::new();
        bench.layer(&lower()).expect("it is taken");
        bench
            .layer(&Archive::default().file(name, "").end())
            .expect_err(name);
    }
    assert_eq!(
        after(
            &Archive::default()
                .file(".wh..wh.plnk/12.34", "")
                .dir(".wh..wh.aufs")
                .end()
        )
        .len(),
        7
    );
}

#[test]
fn a_plain_archive_has_no_whiteouts() {
    let mut bench = Bench::new();
    bench.plain(&lower()).expect("it is taken");
    bench
        .plain(&Archive::default().file("etc/.wh.a", "x").end())
        .expect("it is taken");
    assert!(bench.builder.exists(b"etc/a") && bench.builder.exists(b"etc/.wh.a"));
}
