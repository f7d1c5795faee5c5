//! The agent's options on the kernel's command line.

#[derive(Debug, PartialEq, Eq)]
pub struct Options {
    pub start: Start,
    pub root: String,
    pub root_type: String,
    pub init: Init,
    pub image_init: String,
}

/// When the guest takes its root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    Now,
    /// When the host sends the other options.
    WhenAsked,
}

/// The guest's init.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Init {
    Agent,
    Image,
}

impl Options {
    pub fn parse(line: &str) -> Self {
        let value = |key: &str, default: &str| {
            let found = line
                .split_whitespace()
                .filter_map(|word| word.split_once('='))
                .rfind(|(known, _)| *known == key);
            found.map_or(default, |(_, value)| value).to_owned()
        };
        Self {
            start: if line.split_whitespace().any(|word| word == "sandtree.wait") {
                Start::WhenAsked
            } else {
                Start::Now
            },
            root: value("sandtree.root", "/dev/vda"),
            root_type: value("sandtree.rootfs", "ext4"),
            init: match value("sandtree.init", "agent").as_str() {
                "image" => Init::Image,
                _ => Init::Agent,
            },
            image_init: value("sandtree.image_init", "/sbin/init"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_has_a_default_and_its_last_value_counts() {
        let options = Options::parse(
            "console=ttyS0 sandtree.init=agent sandtree.init=image sandtree.root=/dev/vdb\n",
        );
        assert_eq!(options.init, Init::Image);
        assert_eq!(options.root, "/dev/vdb");
        assert_eq!(options.root_type, "ext4");
        assert_eq!(options.image_init, "/sbin/init");
        assert_eq!(options.start, Start::Now);
        let waiting = Options::parse("panic=-1 sandtree.wait");
        assert_eq!(waiting.start, Start::WhenAsked);
    }
}
