// Package csimap maps between CSI messages and the domain, for the services that
// share it: parameters, capabilities, topology, health.
package csimap

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/ashlar-csi/ashlar/internal/poolset"
	"github.com/ashlar-csi/ashlar/internal/quantity"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

const (
	// TopologyKey is the segment of a topology that names the node.
	TopologyKey = "topology.ashlar.dev/node"
	// NetworkKey is the segment that names the network in which the node reaches others, and they it; a node without one has none.
	NetworkKey = "topology.ashlar.dev/network"
	// ReadOnlyKey is in the publish context of a volume that was claimed read-only.
	ReadOnlyKey = "ashlar.dev/readOnly"
	// GenerationKey is in the publish context of a volume that several nodes can use: the generation of the claim (volume.Claim).
	GenerationKey = "ashlar.dev/claim"

	coPrefix     = "csi.storage.k8s.io/"
	ephemeral    = coPrefix + "ephemeral"
	pvcName      = coPrefix + "pvc/name" // of the provisioner's --extra-create-metadata
	pvcNamespace = coPrefix + "pvc/namespace"
	fsType       = coPrefix + "fstype"
	pvName       = coPrefix + "pv/name"

	encryption        = "encryption"
	encryptionDiscard = "encryption.discard"
	access            = "access"
	homeTimeout       = "homeTimeout"

	// Of volumes with several legs (docs/replication.md).
	replicas           = "replicas"
	replicaTopologyKey = "replicaTopologyKey"
	replaceAfter       = "replaceAfter"

	// maxName is the longest name that an object of Kubernetes can have, in bytes.
	maxName = 253
)

// Missing is the error for a request without a field that it needs.
func Missing(field string) error {
	return fmt.Errorf("%w: the request has no %s", errdefs.ErrInvalid, field)
}

// Topology of what is on a node.
func Topology(node string) *csi.Topology {
	return &csi.Topology{Segments: map[string]string{TopologyKey: node}}
}

// Topologies of a volume that is on a node, and with a network can be used on all nodes of that.
func Topologies(node, network string) []*csi.Topology {
	all := []*csi.Topology{Topology(node)}
	if network != "" {
		all = append(all, &csi.Topology{Segments: map[string]string{NetworkKey: network}})
	}
	return all
}

// ForCO reports whether a parameter is the container orchestrator's own, to be let by.
func ForCO(key string) bool { return strings.HasPrefix(key, coPrefix) }

// MutableOf returns the mutable parameters of a request, without those that are the container orchestrator's own: Kubernetes' external-resizer sends names of the
// claim with --extra-modify-metadata.
func MutableOf(given map[string]string) map[string]string {
	mutable := maps.Clone(given)
	maps.DeleteFunc(mutable, func(key, _ string) bool { return ForCO(key) })
	return mutable
}

// Parameter describes a parameter of a StorageClass, in Markdown.
type Parameter struct{ Name, Values, Default string }

// ClassParameters are the parameters that ParseParameters takes, for docs/reference/parameters.md and for the error about an unknown one. Those that only a CO
// sends are left out.
func ClassParameters() []Parameter {
	var filesystems []string
	for _, t := range filesystem.Types {
		filesystems = append(filesystems, fmt.Sprintf("%s (%d MiB and up)", t, t.MinSize()>>20))
	}
	return []Parameter{
		{"pool", "name of a pool; or a set of pools: names, and patterns with * (`fast-*`), separated by commas", "the node's first one"},
		{"spread", string(volume.SpreadPreferred) + ", " + string(volume.SpreadRequired) + ": the volumes of one StatefulSet in different pools of the set; not for inline ephemeral volumes", "where there is most room"},
		{"copies", string(volume.CopiesLocal) + ": clones and restores are on the node of their source; " + string(volume.CopiesAnywhere) + ": also on others, if the agents have a port (`--agent-endpoint`)", string(volume.CopiesLocal)},
		{"provisioning", string(blockdev.Thick) + ", " + string(blockdev.Thin), "what the pool has; of file pools " + string(blockdev.Thick)},
		{encryption, string(volume.LUKS2) + ": what the pool keeps is encrypted, with the passphrase of the node-stage secret ([more](../use/encryption.md))", "none"},
		{encryptionDiscard, "true: what the volume does not use any more is given back to the pool, which so learns what that is; false. Only with `encryption`", "false"},
		{access, volume.AccessNode.String() + ": the volume can be used on the node that has it; " + string(volume.AccessAny) + ": on all nodes that reach that one ([more](../use/any-node.md)); not for inline ephemeral volumes", volume.AccessNode.String()},
		{homeTimeout, "how long, as 90s or 10m, what is written and read on another node waits while the volume's node is away; then it fails. Only with `access=any`", "for ever"},
		{replicas, "1 to 3: on how many nodes the bytes of the volume are ([more](../use/replicas.md)); new. Only with `access=any`", "1"},
		{replicaTopologyKey, "key of a label of nodes, as topology.kubernetes.io/zone: the replicas are on nodes that have different values of it. Only with `replicas`", "they are on different nodes"},
		{replaceAfter, "how long, as 90s or 10m, a replica may be away while the volume is used, until one is made on another node in its place; 0 is never. Only with `replicas`", "10m"},
		{volume.ParameterPlacement, string(volume.PlacementStay) + ": the bytes of the volume stay where they were made; " + string(volume.PlacementFollow) + ": they move to the node that has used it for a while ([more](../use/moving.md#bytes-that-follow-their-pod)); a VolumeAttributesClass changes it. Only with `access=any`", string(volume.PlacementStay)},
		{fsType, strings.Join(filesystems, ", "), string(filesystem.Types[0])},
	}
}

// Parameters of a StorageClass.
type Parameters struct {
	Pool   string        // a poolset.Set; empty: not given
	Spread volume.Spread // empty: not given
	Copies volume.Copies // empty: not given
	// Provisioning: AnyProvisioning if it was not given.
	Provisioning blockdev.Provisioning
	Encryption   volume.Encryption // zero: not given
	Access       volume.Access     // volume.AccessNode if it was not given
	HomeTimeout  time.Duration     // zero: not given
	Placement    volume.Placement  // empty: not given
	Replicas     volume.Replicas   // zero: not given
	Filesystem   filesystem.Type   // empty: not given
	For          volume.Requester  // zero: not given
}

// isFilesystem reports whether a parameter is the filesystem, as Kubernetes' provisioner reads it: by the
// name that it takes away before it calls, or by the deprecated fstype, in any case of letters, which it leaves.
func isFilesystem(key string) bool { return key == fsType || strings.ToLower(key) == "fstype" }

// readers read the parameters that are ours.
var readers = map[string]func(p *Parameters, key, value string) error{
	"pool": (*Parameters).place, "spread": (*Parameters).place, "copies": (*Parameters).place, "provisioning": (*Parameters).place,
	encryption: (*Parameters).encrypt, encryptionDiscard: (*Parameters).encrypt,
	access: (*Parameters).reach, homeTimeout: (*Parameters).reach, volume.ParameterPlacement: (*Parameters).reach,
	replicas: (*Parameters).replicate, replicaTopologyKey: (*Parameters).replicate, replaceAfter: (*Parameters).replicate,
}

// ParseParameters reads the parameters of a StorageClass. ErrInvalid for one that is unknown (ClassParameters) or has an unknown value, for a filesystem under
// two names, and for parameters that do not go together. Unknown ones of the CO's own (ForCO) are left out.
func ParseParameters(parameters map[string]string) (Parameters, error) {
	var p Parameters
	var filesystemKey string
	for key, value := range parameters {
		switch {
		case isFilesystem(key):
			if filesystemKey != "" {
				return Parameters{}, fmt.Errorf("%w: the filesystem is given twice, as %s and as %s", errdefs.ErrInvalid, filesystemKey, key)
			}
			filesystemKey = key
			if value == "" {
				continue
			}
			var err error
			if p.Filesystem, err = filesystem.ParseType(value); err != nil {
				return Parameters{}, fmt.Errorf("parameter %s: %w", key, err)
			}
		case readers[key] != nil:
			if err := readers[key](&p, key, value); err != nil {
				return Parameters{}, err
			}
		case key == pvcName || key == pvcNamespace || key == pvName:
			if len(value) > maxName {
				return Parameters{}, fmt.Errorf("%w: parameter %s has %d bytes, a name has up to %d", errdefs.ErrInvalid, key, len(value), maxName)
			}
			*map[string]*string{pvcName: &p.For.Name, pvcNamespace: &p.For.Namespace, pvName: &p.For.PersistentVolume}[key] = value
		case !ForCO(key):
			var known []string
			for _, parameter := range ClassParameters() {
				known = append(known, parameter.Name)
			}
			return p, fmt.Errorf("%w: unknown parameter %q; known are %s", errdefs.ErrInvalid, key, strings.Join(known, ", "))
		}
	}
	return p, p.together(parameters)
}

// together returns ErrInvalid if a parameter is given that has a meaning only beside another one, and that one is not given.
func (p *Parameters) together(parameters map[string]string) error {
	if value, given := parameters[encryptionDiscard]; given && p.Encryption.Scheme == volume.NotEncrypted {
		return fmt.Errorf("%w: parameter %s=%q is for volumes that are encrypted; give %s too", errdefs.ErrInvalid, encryptionDiscard, value, encryption)
	}
	if value, given := parameters[homeTimeout]; given && p.Access != volume.AccessAny {
		return fmt.Errorf("%w: parameter %s=%q is for volumes that other nodes than their own can use; give %s=%s too", errdefs.ErrInvalid, homeTimeout, value, access, volume.AccessAny)
	}
	return errors.Join(p.checkReplicas(parameters), volume.CheckPlacement(p.Access, p.Replicas.Legs(), p.Mutable(nil)))
}

// Mutable are the mutable parameters that a volume begins with: those of its VolumeAttributesClass, and what the class says of others.
func (p *Parameters) Mutable(given map[string]string) map[string]string {
	given = MutableOf(given)
	if p.Placement == "" {
		return given
	}
	mutable := map[string]string{volume.ParameterPlacement: string(p.Placement)}
	maps.Copy(mutable, given)
	return mutable
}

// encrypt reads a parameter that says how the bytes of the volume are kept.
func (p *Parameters) encrypt(key, value string) error {
	if key == encryption {
		if p.Encryption.Scheme = volume.Scheme(value); !slices.Contains(volume.Schemes, p.Encryption.Scheme) {
			return fmt.Errorf("%w: parameter %s=%q; %s is known, and volumes without the parameter are not encrypted", errdefs.ErrInvalid, key, value, volume.LUKS2)
		}
		return nil
	}
	if value != "true" && value != "false" {
		return fmt.Errorf("%w: parameter %s=%q; true and false are known", errdefs.ErrInvalid, key, value)
	}
	p.Encryption.Discards = value == "true"
	return nil
}

// leastTimeout is the shortest homeTimeout: a home that restarts, or a network that is reconfigured, is away for some seconds.
const leastTimeout = time.Second

// reach reads a parameter that says from where the volume can be used.
func (p *Parameters) reach(key, value string) error {
	if key == access {
		switch value {
		case volume.AccessNode.String():
			p.Access = volume.AccessNode
		case string(volume.AccessAny):
			p.Access = volume.AccessAny
		default:
			return fmt.Errorf("%w: parameter %s=%q; %s and %s are known", errdefs.ErrInvalid, key, value, volume.AccessNode, volume.AccessAny)
		}
		return nil
	}
	if key == volume.ParameterPlacement {
		p.Placement = volume.Placement(value)
		return volume.CheckMutable(map[string]string{key: value})
	}
	d, err := time.ParseDuration(value)
	if err != nil || d < leastTimeout || d%time.Second != 0 {
		return fmt.Errorf("%w: parameter %s=%q; give whole seconds, as 90s or 10m, or leave it out to wait for ever", errdefs.ErrInvalid, key, value)
	}
	p.HomeTimeout = d
	return nil
}

// place reads a parameter that says where, and how, the volume takes its space.
func (p *Parameters) place(key, value string) error {
	switch key {
	case "pool":
		if _, err := poolset.Parse(value); err != nil {
			return fmt.Errorf("%w: parameter pool=%q: %w", errdefs.ErrInvalid, value, err)
		}
		p.Pool = value
	case "spread":
		if p.Spread = volume.Spread(value); p.Spread != volume.SpreadPreferred && p.Spread != volume.SpreadRequired {
			return fmt.Errorf("%w: parameter spread=%q; preferred and required are known", errdefs.ErrInvalid, value)
		}
	case "copies":
		if p.Copies = volume.Copies(value); p.Copies != volume.CopiesLocal && p.Copies != volume.CopiesAnywhere {
			return fmt.Errorf("%w: parameter copies=%q; local and anywhere are known", errdefs.ErrInvalid, value)
		}
	case "provisioning":
		if p.Provisioning = blockdev.Provisioning(value); p.Provisioning != blockdev.Thick && p.Provisioning != blockdev.Thin {
			return fmt.Errorf("%w: parameter provisioning=%q; thick and thin are known", errdefs.ErrInvalid, value)
		}
	}
	return nil
}

// Agree returns ErrInvalid if the parameters say another filesystem than the capabilities ask for,
// which is what the volume gets. An empty type is block access, to which it does not matter.
func (p Parameters) Agree(asked filesystem.Type) error {
	if p.Filesystem == "" || asked == "" || p.Filesystem == asked {
		return nil
	}
	return fmt.Errorf("%w: the parameters say filesystem %s, and the volume capability %s (%s if it says none): let both say the same",
		errdefs.ErrInvalid, p.Filesystem, asked, filesystem.Types[0])
}

// IsEphemeral reports whether a volume context is that of an inline ephemeral volume.
func IsEphemeral(context map[string]string) bool { return context[ephemeral] == "true" }

// ParseEphemeral reads the volume attributes of an inline ephemeral volume: the
// parameters of a StorageClass, and size, a quantity.
func ParseEphemeral(context map[string]string) (Parameters, volume.Range, error) {
	rest := map[string]string{}
	var size volume.Range
	for key, value := range context {
		if key == "size" {
			n, err := ParseQuantity(value)
			if err != nil {
				return Parameters{}, volume.Range{}, fmt.Errorf("size: %w", err)
			}
			size.Required = n
		} else {
			rest[key] = value
		}
	}
	p, err := ParseParameters(rest)
	return p, size, err
}

// ParseQuantity reads a number of bytes, from 1 to blockdev.MaxSize: digits, or a Kubernetes
// quantity with a suffix of Ki, Mi, Gi, Ti, k, M, G or T. ErrInvalid for anything else.
func ParseQuantity(text string) (int64, error) {
	n := quantity.Parse(text)
	if n == 0 || n > blockdev.MaxSize {
		return 0, fmt.Errorf("%w: %q is no size; write bytes, or a number with Ki, Mi, Gi, Ti, k, M, G or T", errdefs.ErrInvalid, text)
	}
	return n, nil
}

// modes are the access modes that a volume can have. Readers on any number of nodes are all on the volume's, whose topology is that node alone, but for volumes that any
// node can use.
var modes = []csi.VolumeCapability_AccessMode_Mode{
	csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER,
	csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER,
	csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER,
	csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY,
	csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY,
}

// CheckCapabilities returns ErrInvalid unless there is at least one capability, all can be
// served, and they agree on a filesystem. It returns that filesystem, or an empty type
// if all are for block access.
func CheckCapabilities(capabilities ...*csi.VolumeCapability) (filesystem.Type, error) {
	if len(capabilities) == 0 {
		return "", Missing("volume capability")
	}
	var fs filesystem.Type
	for _, c := range capabilities {
		if c == nil {
			return "", Missing("volume capability")
		}
		if mode := c.GetAccessMode().GetMode(); !slices.Contains(modes, mode) {
			return "", fmt.Errorf("%w: access mode %s; a volume is written on one node: %v can be had", errdefs.ErrInvalid, mode, modes)
		}
		switch {
		case c.GetBlock() != nil:
		case c.GetMount() != nil:
			this, err := filesystem.ParseType(c.GetMount().GetFsType())
			if err != nil {
				return "", err
			}
			if fs != "" && fs != this {
				return "", fmt.Errorf("%w: one volume cannot carry both %s and %s", errdefs.ErrInvalid, fs, this)
			}
			if group := c.GetMount().GetVolumeMountGroup(); group != "" {
				return "", fmt.Errorf("%w: volume_mount_group: leave the group of files to the kubelet (fsGroupPolicy File)", errdefs.ErrInvalid)
			}
			if err := mount.CheckOptions(c.GetMount().GetMountFlags()...); err != nil {
				return "", err
			}
			fs = this
		default:
			return "", Missing("access type: block or mount")
		}
	}
	return fs, nil
}

// ModeOf describes how a capability uses a volume, as far as two uses of it by one node
// have to agree.
func ModeOf(c *csi.VolumeCapability) string {
	access := "mount"
	if c.GetBlock() != nil {
		access = "block"
	}
	return access + "," + c.GetAccessMode().GetMode().String()
}

// ReadOnly reports whether a capability is for reading only.
func ReadOnly(c *csi.VolumeCapability) bool {
	switch c.GetAccessMode().GetMode() {
	case csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY, csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY:
		return true
	}
	return false
}

// Health of a volume as CSI says it: one entry for each status and reason (VolumeHealthEntry), with the messages of all that have it.
func Health(id string, problems []blockdev.Problem) *csi.VolumeHealth {
	type kind struct {
		severity blockdev.Severity
		reason   string
	}
	health := &csi.VolumeHealth{VolumeId: id}
	entries := map[kind]*csi.VolumeHealth_VolumeHealthEntry{}
	for _, p := range problems {
		k := kind{p.Severity, p.Reason}
		if have := entries[k]; have != nil {
			have.Message += "; " + p.Message
			continue
		}
		status := map[blockdev.Severity]csi.VolumeHealthErrorType{
			blockdev.Degraded: csi.VolumeHealthErrorType_DEGRADED, blockdev.Inaccessible: csi.VolumeHealthErrorType_INACCESSIBLE,
			blockdev.DataLoss: csi.VolumeHealthErrorType_DATA_LOSS}[p.Severity]
		entries[k] = &csi.VolumeHealth_VolumeHealthEntry{Status: status, Reason: p.Reason, Message: p.Message}
		health.HealthStatuses = append(health.HealthStatuses, entries[k])
	}
	return health
}
