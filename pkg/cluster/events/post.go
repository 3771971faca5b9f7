package events

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// Kubernetes' limits for the reportingInstance and the name of an event, in bytes.
const (
	mostInstance = 128
	mostName     = 253
)

// post writes an event, if the object that it is on exists. If it was written before, it is renewed as a series, or written anew if it is gone. That the
// API server refuses it for good is logged, and is no error.
func (a *Announcer) post(ctx context.Context, e entry) error {
	on, err := a.find(ctx, e.saying)
	if err != nil || on == nil {
		return err
	}
	event := a.event(e, *on)
	if !e.said.IsZero() {
		err := a.goOn(ctx, e, event)
		if !apierrors.IsNotFound(err) {
			return a.tolerate(ctx, err)
		}
	}
	if err := a.kube.Live.Create(ctx, event); !apierrors.IsAlreadyExists(err) {
		return a.tolerate(ctx, err)
	}
	return nil
}

// goOn renews the event of a state that lasts, as a series: the API server keeps it for longer, and `kubectl describe` shows when the state was last seen.
func (a *Announcer) goOn(ctx context.Context, e entry, event *eventsv1.Event) error {
	now := event.DeepCopy()
	since := e.since
	if since.IsZero() {
		since = e.noted
	}
	// The count follows from the time, so that two controllers write the same one.
	now.Series = &eventsv1.EventSeries{Count: int32(2 + min(time.Since(since)/a.options.Again, 1<<20)), LastObservedTime: metav1.NowMicro()}
	return a.kube.Live.Patch(ctx, now, client.MergeFrom(event))
}

// tolerate returns an error if another try may succeed. It logs one that is final, and returns nil.
func (a *Announcer) tolerate(ctx context.Context, err error) error {
	switch {
	case apierrors.IsForbidden(err):
		a.refusal.Do(func() {
			klog.FromContext(ctx).Error(err, "The API server refuses events; nothing else depends on them")
		})
	case apierrors.IsInvalid(err), apierrors.IsBadRequest(err), apierrors.IsNotFound(err): // the last one: the namespace is gone
		klog.FromContext(ctx).Error(err, "The API server does not take an event")
	default:
		return err
	}
	return nil
}

// event returns the Event of an entry on an object. Its name is made from the UID of the object and the key of the entry, so it exists once.
func (a *Announcer) event(e entry, on corev1.ObjectReference) *eventsv1.Event {
	namespace := on.Namespace
	if namespace == "" {
		namespace = metav1.NamespaceDefault // Kubernetes' convention for objects without a namespace
	}
	hash := sha256.Sum256([]byte(strings.Join([]string{string(on.UID), e.key()}, "\x00")))
	suffix := ".ashlar-" + hex.EncodeToString(hash[:8])
	event := &eventsv1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: strings.TrimRight(on.Name[:min(len(on.Name), mostName-len(suffix))], "-.") + suffix},
		EventTime: metav1.NewMicroTime(e.noted), ReportingController: a.options.Driver, ReportingInstance: a.instance,
		Type: e.level, Reason: e.reason, Action: "HealthCheck", Note: e.text(), Regarding: on}
	if v, ok := e.of.(*v1alpha1.Volume); ok && e.on != onVolume {
		related := reference(v, v1alpha1.GroupVersion.String(), "Volume")
		event.Related = &related
	}
	return event
}

func reference(o client.Object, version, kind string) corev1.ObjectReference {
	return corev1.ObjectReference{APIVersion: version, Kind: kind, Namespace: o.GetNamespace(), Name: o.GetName(), UID: o.GetUID()}
}

// find returns the object that an event is on; nil if it does not exist.
func (a *Announcer) find(ctx context.Context, s saying) (*corev1.ObjectReference, error) {
	switch s.on {
	case onVolume, onPV, onClaim:
		if r, is := s.of.(*v1alpha1.ReplicatedVolume); is {
			return a.handles.find(ctx, asVolume(r), s.on)
		}
		v, err := a.volumeOf(ctx, s.of)
		if err != nil || v == nil {
			return nil, err
		}
		if s.on != onVolume {
			return a.handles.find(ctx, v, s.on)
		}
		on := reference(v, v1alpha1.GroupVersion.String(), onVolume)
		return &on, nil
	case onNode:
		name := s.of.GetName()
		if p, ok := s.of.(*v1alpha1.Pool); ok {
			name = p.Spec.NodeName
		}
		node := kube.Node(name)
		if err := a.kube.Cache.Get(ctx, client.ObjectKeyFromObject(node), node); err != nil {
			return nil, client.IgnoreNotFound(err)
		}
		on := reference(node, "v1", onNode)
		return &on, nil
	}
	on := reference(s.of, v1alpha1.GroupVersion.String(), s.on)
	return &on, nil
}

// volumeOf returns a volume itself, or the volume of a snapshot; nil if it does not exist.
func (a *Announcer) volumeOf(ctx context.Context, o client.Object) (*v1alpha1.Volume, error) {
	switch o := o.(type) {
	case *v1alpha1.Volume:
		return o, nil
	case *v1alpha1.Snapshot:
		v := cluster.VolumeNamed(o.Spec.Source)
		if err := a.kube.Cache.Get(ctx, client.ObjectKeyFromObject(v), v); err != nil {
			return nil, client.IgnoreNotFound(err)
		}
		return v, nil
	}
	return nil, nil
}

// asVolume returns a Volume with what handles.find needs to find the PersistentVolume of a volume with several legs.
func asVolume(r *v1alpha1.ReplicatedVolume) *v1alpha1.Volume {
	v := cluster.VolumeNamed(r.Name)
	v.Spec = v1alpha1.VolumeSpec{Name: r.Spec.Name, Pool: r.Spec.Pool, PersistentVolume: r.Spec.Name}
	v.Status.Created = r.Status.Made
	return v
}

// handles finds the PersistentVolumes and claims of volumes. It is not safe for concurrent use.
type handles struct {
	live   client.Client
	driver string

	read  time.Time         // when all PersistentVolumes were last read
	names map[string]string // names of the driver's PersistentVolumes, by volume handle
}

// readEvery is the least time between two reads of all PersistentVolumes, which find those that were written by hand.
const readEvery = time.Minute

// find returns, by kind, the PersistentVolume of a volume, or the PersistentVolumeClaim that is bound to it or waits for it; nil if there is none.
func (h *handles) find(ctx context.Context, v *v1alpha1.Volume, kind string) (*corev1.ObjectReference, error) {
	pv, err := h.persistentVolume(ctx, v)
	if err != nil {
		return nil, err
	}
	if kind == onPV {
		if pv == nil {
			return nil, nil
		}
		on := reference(pv, "v1", onPV)
		return &on, nil
	}
	if pv != nil {
		if ref := pv.Spec.ClaimRef; ref != nil && bound(pv) {
			return &corev1.ObjectReference{APIVersion: "v1", Kind: onClaim, Namespace: ref.Namespace, Name: ref.Name, UID: ref.UID}, nil
		}
		return nil, nil // no claim has it, or the claim is gone
	}
	return h.waiting(ctx, v)
}

// waiting returns the claim that a volume is made for, if it is not bound yet; nil if there is none, or it is another one of that name. As an agent may
// write objects that name any claim, the volume has to have the name that external-provisioner gives to the volume of this claim, and the key of that
// name.
func (h *handles) waiting(ctx context.Context, v *v1alpha1.Volume) (*corev1.ObjectReference, error) {
	ref := v.Spec.ClaimRef
	if ref == nil {
		return nil, nil
	}
	claim := &corev1.PersistentVolumeClaim{}
	if err := h.live.Get(ctx, client.ObjectKey{Namespace: ref.Namespace, Name: ref.Name}, claim); err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	if claim.Spec.VolumeName != "" || v.Spec.Name != cluster.ProvisionedPrefix+string(claim.UID) || v.Name != volume.KeyOf(v.Spec.Name) {
		return nil, nil
	}
	on := reference(claim, "v1", onClaim)
	return &on, nil
}

func bound(pv *corev1.PersistentVolume) bool { return pv.Status.Phase == corev1.VolumeBound }

// persistentVolume returns the PersistentVolume of a volume: the one that it was made for, or one that was written by hand; nil if there is none. If there
// are both, it prefers the one that is bound: the other may have been kept (reclaim policy Retain) when its claim was deleted.
func (h *handles) persistentVolume(ctx context.Context, v *v1alpha1.Volume) (*corev1.PersistentVolume, error) {
	handle := cluster.VolumeID(v).String()
	own, err := h.named(ctx, v.Spec.PersistentVolume, handle)
	if err != nil || own != nil && bound(own) || v.Status.Created == nil { // nobody writes one by hand for a volume that was not made yet
		return own, err
	}
	if err := h.readAll(ctx); err != nil {
		return nil, err
	}
	name := h.names[handle]
	if own != nil && name == own.Name {
		return own, nil
	}
	other, err := h.named(ctx, name, handle)
	if err != nil {
		return nil, err
	}
	if own == nil || other != nil && bound(other) {
		return other, nil
	}
	return own, nil
}

// named returns the PersistentVolume of a name; nil if there is none, or it has another volume handle.
func (h *handles) named(ctx context.Context, name, handle string) (*corev1.PersistentVolume, error) {
	if name == "" {
		return nil, nil
	}
	pv := &corev1.PersistentVolume{}
	err := h.live.Get(ctx, client.ObjectKey{Name: name}, pv)
	if err != nil || h.handle(pv) != handle {
		return nil, client.IgnoreNotFound(err)
	}
	return pv, nil
}

// readAll reads all PersistentVolumes, if it has not done so within readEvery. Only names are kept, as there may be very many.
func (h *handles) readAll(ctx context.Context) error {
	if time.Since(h.read) < readEvery {
		return nil
	}
	names, isBound := map[string]string{}, map[string]bool{}
	if err := kube.EachPage(ctx, h.live, &corev1.PersistentVolumeList{}, func(list *corev1.PersistentVolumeList) {
		for i := range list.Items {
			one := &list.Items[i]
			handle := h.handle(one)
			if handle == "" || names[handle] != "" && (isBound[handle] || !bound(one)) {
				continue
			}
			names[handle], isBound[handle] = one.Name, bound(one)
		}
	}); err != nil {
		return err
	}
	h.read, h.names = time.Now(), names
	return nil
}

// handle returns the volume handle of a PersistentVolume; empty if it is another driver's.
func (h *handles) handle(pv *corev1.PersistentVolume) string {
	if source := pv.Spec.CSI; source != nil && source.Driver == h.driver {
		return source.VolumeHandle
	}
	return ""
}
