package lost

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/validation"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// keys are the Secrets with the passphrase of an encrypted volume, as its PersistentVolume names them; nil: none.
type keys struct {
	stage, expand *corev1.SecretReference
}

// keysOf returns the Secrets that the class names for an encrypted volume, as the provisioner found them when the volume was made: pv is the name that its
// PersistentVolume had then. claim is the one that it was made for, if that is there. If the class does not tell the Secret, why says so, and what to do.
func (l *lacking) keysOf(v *v1alpha1.Volume, pv string, claim *corev1.PersistentVolumeClaim) (found keys, why string) {
	if l.unknown != "" {
		return keys{}, l.unknown
	}
	if found.stage, why = l.secret("node-stage-secret", v, pv, claim); why != "" {
		return keys{}, why
	}
	if found.stage == nil {
		return keys{}, fmt.Sprintf("StorageClass %s names none (csi.storage.k8s.io/node-stage-secret-name); give the class that it was made with (--storage-class)", l.class)
	}
	found.expand, why = l.secret("node-expand-secret", v, pv, claim)
	return found, why
}

// readClass reads the class, once. One that is not there, or that may not be read, is no error (unknown).
func (l *lacking) readClass(ctx context.Context) error {
	if l.asked {
		return nil
	}
	err := l.Get(ctx, client.ObjectKey{Name: l.class}, &l.of)
	switch {
	case apierrors.IsNotFound(err):
		l.unknown = fmt.Sprintf("there is no StorageClass %s; make it, or give the one that it was made with (--storage-class)", l.class)
	case apierrors.IsForbidden(err):
		l.unknown = fmt.Sprintf("you may not get StorageClass %s, which names it", l.class)
	case err != nil:
		return fmt.Errorf("read StorageClass %s: %w", l.class, err)
	}
	l.asked = true
	return nil
}

// secret returns the Secret that the class names for calls of a kind, by the provisioner's rules; nil: none. why says why it is not known.
func (l *lacking) secret(kind string, v *v1alpha1.Volume, pv string, claim *corev1.PersistentVolumeClaim) (_ *corev1.SecretReference, why string) {
	const prefix = "csi.storage.k8s.io/"
	name, space := l.of.Parameters[prefix+kind+"-name"], l.of.Parameters[prefix+kind+"-namespace"]
	if name == "" && space == "" { // one for all calls
		name, space = l.of.Parameters[prefix+"secret-name"], l.of.Parameters[prefix+"secret-namespace"]
	}
	if name == "" && space == "" {
		return nil, ""
	}
	tokens := map[string]string{"pv.name": pv}
	if ref := v.Spec.ClaimRef; ref != nil {
		tokens["pvc.namespace"] = ref.Namespace
	}
	namespace, lacks := resolve(space, tokens)
	if ref := v.Spec.ClaimRef; ref != nil {
		tokens["pvc.name"] = ref.Name
	}
	if claim != nil {
		for key, value := range claim.Annotations {
			tokens["pvc.annotations['"+key+"']"] = value
		}
	}
	resolved, also := resolve(name, tokens)
	if lacks = append(lacks, also...); len(lacks) > 0 {
		return nil, fmt.Sprintf("StorageClass %s names it by %s, which nothing tells any more; write the PersistentVolume by hand (docs/operate/static-volumes.md)", l.class, strings.Join(lacks, ", "))
	}
	if len(validation.ValidateNamespaceName(namespace, false)) > 0 || len(validation.NameIsDNSSubdomain(resolved, false)) > 0 {
		return nil, fmt.Sprintf("%q in namespace %q, as StorageClass %s names it, is no name of a Secret; give the class that it was made with (--storage-class)", resolved, namespace, l.class)
	}
	return &corev1.SecretReference{Namespace: namespace, Name: resolved}, ""
}

// resolve replaces the tokens of a template. lacks has those whose values are not known.
func resolve(template string, tokens map[string]string) (text string, lacks []string) {
	text = os.Expand(template, func(token string) string {
		value, known := tokens[token]
		if written := "${" + token + "}"; !known && !slices.Contains(lacks, written) {
			lacks = append(lacks, written)
		}
		return value
	})
	return text, lacks
}
