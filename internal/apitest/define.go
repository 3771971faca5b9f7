package apitest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/yaml"
)

var definitions = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}

// Define creates the custom resource definitions of deploy/kubernetes/crds, or updates them, and waits until the resources are served, and guard.yaml
// is in force if it was.
func (s *Server) Define(ctx context.Context) error {
	client, err := dynamic.NewForConfig(s.Config(Admin))
	if err != nil {
		return err
	}
	files, err := filepath.Glob(filepath.Join(root(), "deploy/kubernetes/crds/*.yaml"))
	if err != nil || len(files) == 0 {
		return fmt.Errorf("no definitions in deploy/kubernetes/crds: %w", err)
	}
	crds := client.Resource(definitions)
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		crd := &unstructured.Unstructured{}
		if err := yaml.Unmarshal(text, &crd.Object); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		_, err = crds.Create(ctx, crd, metav1.CreateOptions{FieldValidation: "Strict"})
		if apierrors.IsAlreadyExists(err) {
			err = s.Redefine(ctx, crd.GetName(), func(have *unstructured.Unstructured) { have.Object["spec"] = crd.Object["spec"] })
		}
		if err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		for established := false; !established; {
			time.Sleep(20 * time.Millisecond)
			crd, err := crds.Get(ctx, crd.GetName(), metav1.GetOptions{})
			if err != nil {
				return err
			}
			group, _, _ := unstructured.NestedString(crd.Object, "spec", "group")
			plural, _, _ := unstructured.NestedString(crd.Object, "spec", "names", "plural")
			// The condition Established comes before the resource is served everywhere.
			_, err = client.Resource(schema.GroupVersionResource{Group: group, Version: "v1alpha1", Resource: plural}).List(ctx, metav1.ListOptions{})
			if established = err == nil; err != nil && !meta.IsNoMatchError(err) && ctx.Err() != nil {
				return err
			}
		}
	}
	return s.configured(ctx)
}

// Redefine changes a custom resource definition. It takes a moment until that is in force.
func (s *Server) Redefine(ctx context.Context, name string, edit func(crd *unstructured.Unstructured)) error {
	client, err := dynamic.NewForConfig(s.Config(Admin))
	if err != nil {
		return err
	}
	crds := client.Resource(definitions)
	return retry.RetryOnConflict(retry.DefaultBackoff, func() error { // the server itself updates its status
		crd, err := crds.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		edit(crd)
		_, err = crds.Update(ctx, crd, metav1.UpdateOptions{})
		return err
	})
}

// Undefine deletes custom resource definitions with all objects, and waits until they are gone.
func (s *Server) Undefine(ctx context.Context, names ...string) error {
	client, err := dynamic.NewForConfig(s.Config(Admin))
	if err != nil {
		return err
	}
	crds := client.Resource(definitions)
	for _, name := range names {
		if err := crds.Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
			return err
		}
	}
	for _, name := range names {
		for {
			_, err := crds.Get(ctx, name, metav1.GetOptions{})
			if apierrors.IsNotFound(err) {
				break
			}
			if ctx.Err() != nil {
				return fmt.Errorf("%s is still there: %w", name, errors.Join(err, ctx.Err()))
			}
			time.Sleep(20 * time.Millisecond)
		}
	}
	return nil
}
