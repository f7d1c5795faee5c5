//! The codes of errors: a stable name for each failure that a caller may want to tell apart.
//!
//! Always: a code keeps its name, its kind and the names of its arguments; new failures get new
//! codes. `docs/errors.md` lists every code with cause and remedy, and a test compares it with this
//! table.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The dozen ways to fail that edges tell apart. A kind is a function of the code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    NotFound,
    AlreadyExists,
    Invalid,
    Busy,
    WrongState,
    Unsupported,
    Exhausted,
    Timeout,
    Guest,
    Engine,
    Corrupt,
    Io,
    /// A defect of this program.
    Internal,
}

impl ErrorKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NotFound => "not_found",
            Self::AlreadyExists => "already_exists",
            Self::Invalid => "invalid",
            Self::Busy => "busy",
            Self::WrongState => "wrong_state",
            Self::Unsupported => "unsupported",
            Self::Exhausted => "exhausted",
            Self::Timeout => "timeout",
            Self::Guest => "guest",
            Self::Engine => "engine",
            Self::Corrupt => "corrupt",
            Self::Io => "io",
            Self::Internal => "internal",
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Makes the enum of one row for each code: its kind, its variant, its name.
macro_rules! codes {
    ($($kind:ident: $($code:ident = $name:literal),* ;)*) => {
        /// Which failure it is.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Code {
            $($($code,)*)*
        }

        impl Code {
            pub const ALL: &[Code] = &[$($(Code::$code,)*)*];

            /// The name, which is the same in JSON, HTTP and Python.
            pub fn as_str(self) -> &'static str {
                match self {
                    $($(Code::$code => $name,)*)*
                }
            }

            pub fn kind(self) -> ErrorKind {
                match self {
                    $($(Code::$code)|* => ErrorKind::$kind,)*
                }
            }
        }
    };
}

codes! {
    NotFound:
        NoSandbox = "no_sandbox",
        NoCommand = "no_command",
        NoState = "no_state",
        NoStep = "no_step",
        NoMount = "no_mount",
        NoDisplay = "no_display",
        NoXServer = "no_x_server",
        NoKey = "no_key",
        NoImage = "no_image",
        NoSnapshot = "no_snapshot",
        NoImageOrSnapshot = "no_image_or_snapshot",
        NotPulled = "not_pulled",
        NotInRegistry = "not_in_registry",
        MissingImage = "missing_image",
        MissingKernel = "missing_kernel",
        MissingBase = "missing_base",
        NoSaveBase = "no_save_base",
        NoQemu = "no_qemu",
        FileNotFound = "file_not_found";
    AlreadyExists:
        SandboxNameTaken = "sandbox_name_taken",
        NameTaken = "name_taken",
        TagTaken = "tag_taken",
        MountTaken = "mount_taken",
        FileExists = "file_exists";
    Invalid:
        Usage = "usage",
        Invalid = "invalid",
        InvalidLabels = "invalid_labels",
        InvalidRecipe = "invalid_recipe",
        InvalidReference = "invalid_reference",
        InvalidDigest = "invalid_digest",
        InvalidSize = "invalid_size",
        InvalidMachine = "invalid_machine",
        UnknownCpu = "unknown_cpu",
        UnknownFormat = "unknown_format",
        NameIsAnId = "name_is_an_id",
        OtherKind = "other_kind",
        NotASnapshot = "not_a_snapshot",
        NotAStore = "not_a_store",
        ForeignRoot = "foreign_root",
        OpenRoot = "open_root",
        MemoryDirectory = "memory_directory",
        RequestTooLong = "request_too_long",
        NoRegistry = "no_registry",
        RegistryUnauthorized = "registry_unauthorized",
        RegistryDenied = "registry_denied",
        RegistryFile = "registry_file",
        CredentialHelper = "credential_helper";
    Busy:
        SandboxBusy = "sandbox_busy",
        PortUnavailable = "port_unavailable",
        GuestQueueFull = "guest_queue_full",
        GuestNotRestored = "guest_not_restored",
        RegistryBusy = "registry_busy",
        NestedGuestRuns = "nested_guest_runs";
    WrongState:
        ApplyConflicts = "apply_conflicts",
        WrongState = "wrong_state",
        StateInUse = "state_in_use",
        NoMemory = "no_memory",
        Interrupted = "interrupted",
        LinkEnded = "link_ended";
    Unsupported:
        NoMountPort = "no_mount_port",
        NotAsSaved = "not_as_saved",
        ForeignArchitecture = "foreign_architecture",
        ForeignState = "foreign_state",
        NestedState = "nested_state",
        LackingProcessor = "lacking_processor",
        NoSockets = "no_sockets",
        ClosedFileSystem = "closed_file_system",
        KeeperVersion = "keeper_version",
        AgentTooOld = "agent_too_old",
        LinkVersion = "link_version",
        QemuTooOld = "qemu_too_old",
        AcceleratorUnusable = "accelerator_unusable",
        ScreensUnsupported = "screens_unsupported",
        NewerStore = "newer_store",
        OlderStore = "older_store",
        NewerRecord = "newer_record",
        NewerSnapshot = "newer_snapshot",
        UnfoldableLayers = "unfoldable_layers",
        UnsupportedFileSystem = "unsupported_file_system",
        UnknownMediaType = "unknown_media_type",
        NoPlatform = "no_platform",
        ToolMissing = "tool_missing",
        ToolFailed = "tool_failed",
        UnknownPackage = "unknown_package",
        NoDebianSources = "no_debian_sources",
        DownloadFailed = "download_failed",
        IncompletePackage = "incomplete_package",
        MissingModule = "missing_module";
    Exhausted:
        NotEnoughMemory = "not_enough_memory",
        NotEnoughSpace = "not_enough_space",
        DiskFull = "disk_full",
        GuestStalled = "guest_stalled",
        GuestDiskFull = "guest_disk_full",
        OutputLimit = "output_limit",
        TooManyLayers = "too_many_layers";
    Timeout:
        BootTimeout = "boot_timeout",
        GuestTimeout = "guest_timeout",
        ScreenTimeout = "screen_timeout",
        QemuTimeout = "qemu_timeout",
        QemuNotEnded = "qemu_not_ended";
    Guest:
        MountServer = "mount_server",
        BootFailed = "boot_failed",
        BuildStepFailed = "build_step_failed",
        ServiceFailed = "service_failed",
        CommandNotFound = "command_not_found",
        CommandNotStarted = "command_not_started",
        Unacknowledged = "unacknowledged",
        LinkBroken = "link_broken",
        GuestRefused = "guest_refused",
        GuestPermissionDenied = "guest_permission_denied",
        NotADirectory = "not_a_directory",
        IsADirectory = "is_a_directory",
        DirectoryNotEmpty = "directory_not_empty";
    Engine:
        QemuVersionUnknown = "qemu_version_unknown",
        QemuNotStarted = "qemu_not_started",
        QemuEnded = "qemu_ended",
        QemuRefused = "qemu_refused",
        QemuProtocol = "qemu_protocol",
        JailFailed = "jail_failed",
        UnreadableByMachine = "unreadable_by_machine",
        MemoryNotMapped = "memory_not_mapped",
        MemoryUntracked = "memory_untracked",
        StateNotLoaded = "state_not_loaded",
        StateNotTaken = "state_not_taken",
        DiskNotCopied = "disk_not_copied",
        DiskSwitchedLate = "disk_switched_late";
    Corrupt:
        DamagedDisk = "damaged_disk",
        DamagedLayer = "damaged_layer",
        DamagedRecord = "damaged_record",
        DamagedSnapshot = "damaged_snapshot",
        DamagedArtifact = "damaged_artifact",
        BrokenState = "broken_state",
        ArchiveRefused = "archive_refused",
        ImageRefused = "image_refused",
        MalformedInput = "malformed_input",
        UnusableRoot = "unusable_root",
        WrongContent = "wrong_content",
        TooLarge = "too_large";
    Io:
        Io = "io",
        PermissionDenied = "permission_denied",
        ReadOnly = "read_only",
        Cancelled = "cancelled",
        NotDurable = "not_durable",
        IndexUnwritable = "index_unwritable",
        NotSaved = "not_saved",
        RemovedUnsaved = "removed_unsaved",
        KeeperUnreachable = "keeper_unreachable",
        NoRandomBytes = "no_random_bytes",
        RegistryUnreachable = "registry_unreachable",
        RegistryTls = "registry_tls",
        RegistryRefused = "registry_refused",
        RegistryProtocol = "registry_protocol";
    Internal:
        Panicked = "panicked",
        StoreMisused = "store_misused";
}

impl Code {
    /// The code of this name; none if a newer program gave it.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|code| code.as_str() == name)
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
