// Package view makes the overview of a cluster out of its objects. It only reads, through any reader: the API server with the rights of a person, or the
// caches of a program that watches. It imports nothing that needs Linux.
package view

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// Options of Take.
type Options struct {
	// Version of the program.
	Version string
	// Page is how many objects a list asks for at once; 0: all, which is right for a cache.
	Page int64
	// Namespace is where the Leases of the agents are; empty: they are looked for in all namespaces.
	Namespace string
	// Now is the time against which Leases and ages are measured, by the clock of the API server; zero: that of this machine.
	Now time.Time
	// Silent reports whether a node's agent counts as silent, for a caller that watches the Leases; nil: Take reads the Leases.
	Silent func(node string) bool
	// Kubernetes: PersistentVolumes, pods and StorageClasses are read too. It has to be false for a cache that does not watch them.
	Kubernetes bool
}

// Scheme knows all kinds that Take reads.
func Scheme() (*runtime.Scheme, error) {
	scheme := runtime.NewScheme()
	return scheme, errors.Join(v1alpha1.AddToScheme(scheme), corev1.AddToScheme(scheme), coordinationv1.AddToScheme(scheme), storagev1.AddToScheme(scheme))
}

// Take makes the overview of a cluster from one list of each kind. A kind that the reader may not list is left out, and Overview.Missing says so; that it may
// not list pools, volumes or snapshots is an error.
func Take(ctx context.Context, from client.Reader, o Options) (*overview.Overview, error) {
	if o.Now.IsZero() {
		o.Now = time.Now()
	}
	t := &taking{ctx: ctx, from: from, options: o, out: &overview.Overview{Taken: o.Now.UTC(), Cluster: true, Driver: v1alpha1.DefaultDriver, Version: o.Version}}
	if err := t.read(); err != nil {
		return nil, err
	}
	t.nodes()
	t.volumes()
	t.snapshots()
	t.classes()
	t.out.Finish()
	return t.out, nil
}

// taking is an overview that is being made.
type taking struct {
	ctx     context.Context
	from    client.Reader
	options Options
	out     *overview.Overview

	pools      []v1alpha1.Pool
	objects    []v1alpha1.Volume
	replicated []v1alpha1.ReplicatedVolume
	wholes     bool // all of these are known
	copies     []v1alpha1.Snapshot
	machines   map[string]machine
	leases     map[string]coordinationv1.Lease // by node
	listening  bool                            // it is known which agents are silent: the Leases could be listed, or there is Options.Silent
	known      bool                            // the nodes could be listed
	handles    map[string]standing             // PersistentVolumes by handle
	claims     map[string]overview.Ref         // the claims of these PersistentVolumes, by handle
	holders    map[overview.Ref]string         // the handle of the PersistentVolume that a claim has now, by claim
	users      map[overview.Ref][]overview.Ref // pods by claim
	drivers    map[string]bool                 // namespaces that pods of agents are in
	sorts      []storagev1.StorageClass
}

// machine is what is needed of a Node object.
type machine struct {
	ready, gone bool
	cordoned    bool
	labels      map[string]string
}

// standing is the PersistentVolume that is shown for a handle. Of several it is one that is bound, else one that may become bound, else one that was; among
// equals the first by name.
type standing struct {
	name string
	rank int // the lowest is shown
}

// standingOf returns the standing of a PersistentVolume, by its phase.
func standingOf(pv *corev1.PersistentVolume) standing {
	switch pv.Status.Phase {
	case corev1.VolumeBound:
		return standing{pv.Name, 0}
	case corev1.VolumeReleased, corev1.VolumeFailed:
		return standing{pv.Name, 2}
	}
	return standing{pv.Name, 1}
}

// before reports whether s is shown rather than other.
func (s standing) before(other standing) bool {
	return cmp.Or(cmp.Compare(s.rank, other.rank), cmp.Compare(s.name, other.name)) < 0
}

// read lists all that Take needs.
func (t *taking) read() error {
	for _, err := range []error{
		each(t, &v1alpha1.PoolList{}, func(l *v1alpha1.PoolList) { t.pools = append(t.pools, l.Items...) }),
		each(t, &v1alpha1.VolumeList{}, func(l *v1alpha1.VolumeList) { t.objects = append(t.objects, l.Items...) }),
		each(t, &v1alpha1.SnapshotList{}, func(l *v1alpha1.SnapshotList) { t.copies = append(t.copies, l.Items...) }),
	} {
		if err != nil {
			return err
		}
	}
	err := each(t, &v1alpha1.ReplicatedVolumeList{}, func(l *v1alpha1.ReplicatedVolumeList) { t.replicated = append(t.replicated, l.Items...) })
	if t.wholes = err == nil; !apierrors.IsNotFound(err) { // older definitions know none
		if err := t.optional("replicatedvolumes.ashlar.dev", "which volumes are replicas of one", err); err != nil {
			return err
		}
	}
	missing := len(t.out.Missing)
	t.machines = map[string]machine{}
	if err := t.optional("nodes", "which of them are gone or not ready", each(t, &corev1.NodeList{}, t.addNodes)); err != nil {
		return err
	}
	t.known = len(t.out.Missing) == missing
	if t.options.Kubernetes {
		if err := t.readKubernetes(); err != nil {
			return err
		}
	}
	if err := t.readLeases(); err != nil {
		return err
	}
	t.out.Blind = !t.known || !t.listening
	return nil
}

// readLeases reads the heartbeats of the agents. Only Leases in the namespaces of the agents' pods count, if these are known: tenants may write Leases in
// their own namespaces. Of several Leases for a node the newest counts if the namespaces of agents are known, and the oldest if not: then a Lease of
// somebody else may raise a false alarm, but hides no silent agent.
func (t *taking) readLeases() error {
	t.leases, t.listening = map[string]coordinationv1.Lease{}, t.options.Silent != nil
	if t.options.Silent != nil {
		return nil
	}
	before, known, namespaces := len(t.out.Missing), len(t.drivers) > 0 || t.options.Namespace != "", map[string]bool{}
	err := t.optional("leases", "whether the agents are heard", each(t, &coordinationv1.LeaseList{}, func(l *coordinationv1.LeaseList) {
		for _, lease := range l.Items {
			elsewhere := len(t.drivers) > 0 && !t.drivers[lease.Namespace]
			if lease.Spec.HolderIdentity == nil || lease.Spec.RenewTime == nil || elsewhere {
				continue
			}
			namespaces[lease.Namespace] = true
			node := *lease.Spec.HolderIdentity
			if have, there := t.leases[node]; !there || renewed(&lease).After(renewed(&have)) == known {
				t.leases[node] = lease
			}
		}
	}, client.InNamespace(t.options.Namespace), client.MatchingLabels{v1alpha1.HeartbeatLabel: v1alpha1.HeartbeatOfAgent}))
	t.listening = err == nil && len(t.out.Missing) == before
	if !known && len(namespaces) > 1 {
		t.out.Missing = append(t.out.Missing, fmt.Sprintf("leases: agents have them in the namespaces %s, and which of these is the driver's only its pods tell: of each node the oldest counts",
			strings.Join(slices.Sorted(maps.Keys(namespaces)), ", ")))
	}
	return err
}

// readKubernetes lists PersistentVolumes, pods and StorageClasses: which claims and pods the volumes have.
func (t *taking) readKubernetes() error {
	t.handles, t.claims, t.holders = map[string]standing{}, map[string]overview.Ref{}, map[overview.Ref]string{}
	t.users, t.drivers = map[overview.Ref][]overview.Ref{}, map[string]bool{}
	for _, one := range []struct {
		what, of string
		err      error
	}{
		{"persistentvolumes", "which of them stand for the volumes", each(t, &corev1.PersistentVolumeList{}, t.addPersistentVolumes)},
		{"pods", "which of them use the volumes", each(t, &corev1.PodList{}, t.addPods)},
		{"storageclasses", "which pools they use", each(t, &storagev1.StorageClassList{}, func(l *storagev1.StorageClassList) { t.sorts = append(t.sorts, l.Items...) })},
	} {
		if err := t.optional(one.what, one.of, one.err); err != nil {
			return err
		}
	}
	return nil
}

// optional takes the error of a list that an overview can do without. If it is that the reader may not list what, it adds to Missing that it is not known of,
// and returns nil.
func (t *taking) optional(what, of string, err error) error {
	if apierrors.IsForbidden(err) {
		t.out.Missing = append(t.out.Missing, fmt.Sprintf("%s: you may not list them, so it is not known %s", what, of))
		return nil
	}
	return err
}

// each lists all objects of a kind, in pages, and calls visit with each page. The objects may be a cache's own, and must not be changed.
func each[L client.ObjectList](t *taking, empty L, visit func(L), which ...client.ListOption) error {
	for token := ""; ; {
		list := empty.DeepCopyObject().(L)                                             // a new list for each page: visit may keep the items
		options := append([]client.ListOption{client.UnsafeDisableDeepCopy}, which...) // nothing of it is changed
		if t.options.Page > 0 {
			options = append(options, client.Limit(t.options.Page), client.Continue(token))
		}
		if err := t.from.List(t.ctx, list, options...); err != nil {
			return fmt.Errorf("list %T: %w", list, err)
		}
		visit(list)
		if token = list.GetContinue(); token == "" || t.options.Page == 0 { // a cache gives all objects, and a token that cannot be used
			return nil
		}
	}
}

func (t *taking) addNodes(l *corev1.NodeList) {
	for i := range l.Items {
		m := machine{labels: l.Items[i].Labels, cordoned: l.Items[i].Spec.Unschedulable}
		for _, c := range l.Items[i].Status.Conditions {
			m.ready = m.ready || c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
		}
		for _, taint := range l.Items[i].Spec.Taints {
			m.gone = m.gone || taint.Key == v1alpha1.GoneTaint
		}
		t.machines[l.Items[i].Name] = m
	}
}

func (t *taking) addPersistentVolumes(l *corev1.PersistentVolumeList) {
	for i := range l.Items {
		pv := &l.Items[i]
		handle, stands := "", false // empty for a PersistentVolume that is not of CSI: its claim has it all the same
		if csi := pv.Spec.CSI; csi != nil {
			handle = csi.Driver + " " + csi.VolumeHandle
			have, there := t.handles[handle]
			stands = !there || standingOf(pv).before(have)
		}
		if stands {
			t.handles[handle] = standingOf(pv)
			delete(t.claims, handle)
		}
		if ref := pv.Spec.ClaimRef; ref != nil {
			claim := overview.Ref{Namespace: ref.Namespace, Name: ref.Name}
			if stands {
				t.claims[handle] = claim
			}
			_, held := t.holders[claim]
			if phase := pv.Status.Phase; phase == corev1.VolumeBound || phase != corev1.VolumeReleased && phase != corev1.VolumeFailed && !held {
				t.holders[claim] = handle // else the claim is gone, and a claim of that name is a new one
			}
		}
	}
}

// AgentLabels are on the pods of agents.
var AgentLabels = map[string]string{"app.kubernetes.io/name": "ashlar", "app.kubernetes.io/component": "node"}

// AgentContainer is the container of the driver in a pod of an agent.
const AgentContainer = "driver"

// IsAgent reports whether a pod is that of an agent: by its labels, and by a privileged container of the driver. Whoever may make pods can give them the
// labels; but who may make privileged containers on a node is root there anyway.
func IsAgent(pod *corev1.Pod) bool {
	for label, value := range AgentLabels {
		if pod.Labels[label] != value {
			return false
		}
	}
	return slices.ContainsFunc(pod.Spec.Containers, func(c corev1.Container) bool {
		return c.Name == AgentContainer && c.SecurityContext != nil && c.SecurityContext.Privileged != nil && *c.SecurityContext.Privileged
	})
}

// addPods notes which pods use which claim, and which namespaces agents are in. Pods that have ended do not count.
func (t *taking) addPods(l *corev1.PodList) {
	for i := range l.Items {
		pod := &l.Items[i]
		if pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
			continue
		}
		if IsAgent(pod) {
			t.drivers[pod.Namespace] = true
		}
		for _, v := range pod.Spec.Volumes {
			claim := overview.Ref{Namespace: pod.Namespace}
			switch {
			case v.PersistentVolumeClaim != nil:
				claim.Name = v.PersistentVolumeClaim.ClaimName
			case v.Ephemeral != nil:
				claim.Name = pod.Name + "-" + v.Name
			default:
				continue
			}
			t.users[claim] = append(t.users[claim], overview.Ref{Namespace: pod.Namespace, Name: pod.Name})
		}
	}
}

// classes adds the StorageClasses of the driver.
func (t *taking) classes() {
	for i := range t.sorts {
		if c := &t.sorts[i]; c.Provisioner == t.out.Driver {
			class := overview.Class{Name: c.Name, Pool: c.Parameters["pool"], Nodes: t.allowed(c.AllowedTopologies)}
			if c.Parameters["access"] == "any" {
				class.Nodes = t.among(&class, func(s *v1alpha1.PoolStatus) bool { return s.Network != nil })
			}
			scheme := c.Parameters["encryption"]
			if scheme != "" {
				class.Header = v1alpha1.EncryptionHeader
				class.Nodes = t.among(&class, func(s *v1alpha1.PoolStatus) bool { return encrypts(s, scheme) })
			}
			if n, err := strconv.Atoi(c.Parameters["replicas"]); err == nil && n > 1 {
				class.Replicas, class.Sites = n, t.sites(c.Parameters["replicaTopologyKey"], scheme)
			}
			t.out.Classes = append(t.out.Classes, class)
		}
	}
}

// encrypts reports whether volumes of a pool can be encrypted by a scheme; empty: not encrypted.
func encrypts(s *v1alpha1.PoolStatus, scheme string) bool {
	return scheme == "" || slices.Contains(s.Encryption, scheme)
}

// among returns the nodes that a class allows, and that have a pool whose status is says yes to.
func (t *taking) among(class *overview.Class, is func(*v1alpha1.PoolStatus) bool) []string {
	nodes := []string{}
	for i := range t.pools {
		p := &t.pools[i]
		if node := p.Spec.NodeName; is(&p.Status) && class.Allows(node) && !slices.Contains(nodes, node) {
			nodes = append(nodes, node)
		}
	}
	return nodes
}

// sites returns the site of each node that may have a replica, by node: the value of a label of the node, or without a label the node itself. No two
// replicas of a volume are at one site. scheme is how they are encrypted. The controller places them by the same rule.
func (t *taking) sites(label, scheme string) map[string]overview.Site {
	sites := map[string]overview.Site{}
	for i := range t.pools {
		p := &t.pools[i]
		node := p.Spec.NodeName
		at := overview.Site{Name: node}
		if label != "" {
			at.Name = t.machines[node].labels[label]
		}
		if p.Status.Network != nil && at.Name != "" && !t.machines[node].cordoned && encrypts(&p.Status, scheme) {
			at.Network = p.Status.Network.Name
			sites[node] = at
		}
	}
	return sites
}

// allowed returns the nodes that match one of the terms; nil if there are no terms. If the nodes could not be listed, their labels are not known, and each
// requirement of a label counts as met.
func (t *taking) allowed(terms []corev1.TopologySelectorTerm) []string {
	if len(terms) == 0 {
		return nil
	}
	names := []string{}
	for _, n := range t.out.Nodes {
		is := func(one corev1.TopologySelectorLabelRequirement) bool {
			if one.Key == v1alpha1.TopologyKey {
				return slices.Contains(one.Values, n.Name)
			}
			value, has := t.machines[n.Name].labels[one.Key]
			return !t.known || has && slices.Contains(one.Values, value)
		}
		if slices.ContainsFunc(terms, func(term corev1.TopologySelectorTerm) bool {
			return !slices.ContainsFunc(term.MatchLabelExpressions, func(one corev1.TopologySelectorLabelRequirement) bool { return !is(one) })
		}) {
			names = append(names, n.Name)
		}
	}
	return names
}

// driver returns the name of the driver, as the pools say it: all of them have the same one.
func (t *taking) driver() string {
	if len(t.pools) == 0 {
		return v1alpha1.DefaultDriver
	}
	return cmp.Or(t.pools[0].Spec.Driver, v1alpha1.DefaultDriver)
}
